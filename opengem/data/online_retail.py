"""UCI Online Retail: a year of invoices of a British gift wholesaler (Chen, Sain and Guo, 2012; CC BY 4.0).

Read it from the file a user downloaded (`PAGE`, DOI 10.24432/C5BW33). Kept are lines with a customer,
a positive quantity and no cancellation. An invoice is a basket, at the time of its last line. The shop has no product
catalogue: attributes come from the stock code, the description and the price of a product's first line in the log,
which any candidate already has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from opengem.data.next_basket import Log, Shop, Task, clock, seconds, write
from opengem.data.schema import Feature
from opengem.errors import UserError

PAGE = "https://archive.ics.uci.edu/dataset/352/online+retail"
COLUMNS = {
    "InvoiceNo": pa.string(),
    "StockCode": pa.string(),
    "Description": pa.string(),
    "Quantity": pa.int64(),
    "InvoiceDate": pa.string(),
    "UnitPrice": pa.float64(),
    "CustomerID": pa.string(),
    "Country": pa.string(),
}
PRICE_BANDS = (0.4, 0.6, 0.85, 1.25, 1.65, 2.1, 2.95, 4.25, 6.95, 12.0)  # pounds; about tenths of the products


def build(
    out: Path, *, file: Path, test_from: str = "2011-11-01", repurchase_days: int = 30, seed: int = 0,
    overwrite: bool = False) -> None:
    """Prepare the UCI Online Retail invoices from the file you downloaded (CSV, XLSX or Parquet).

    The file is at https://archive.ics.uci.edu/dataset/352/online+retail (CC BY 4.0).
    Task: for every invoice, which products are bought (`click`, with 4 popularity-sampled negatives each), and which of
    them again within 30 days (`convert`).

    Args:
        out: folder to write.
        file: the downloaded table, with the column names of UCI (InvoiceNo, StockCode, ...).
        test_from: first day of the test split.
        repurchase_days: days within which buying again counts as a conversion.
        seed: seed of the sampled negatives.
        overwrite: replace what is in the folder.
    """
    task = Task(seconds(test_from, "test_from"), repurchase_days=repurchase_days, seed=seed)
    write(out, load(file), task, overwrite)


def load(file: Path) -> Shop:
    """Read and filter the table. Raises UserError for a missing file, an unknown suffix, column or date."""
    lines = {name: column.to_numpy(zero_copy_only=False) for name, column in _purchases(_read(file)).items()}
    invoices, basket = np.unique(lines["InvoiceNo"], return_inverse=True)
    closed = np.zeros(len(invoices), np.int64)
    np.maximum.at(closed, basket, lines["InvoiceDate"])
    names, user = np.unique(lines["CustomerID"], return_inverse=True)
    codes, product = np.unique(lines["StockCode"], return_inverse=True)
    log, order = Log.sort(
        user, closed[basket], basket, product + 1, np.zeros(len(user), bool), len(names), len(codes) + 1
    )
    lines = {name: values[order] for name, values in lines.items()}
    _, first_line = np.unique(log.product, return_index=True)
    countries, country = np.unique(lines["Country"], return_inverse=True)
    return Shop(
        name="online-retail",
        source=f"UCI Online Retail (CC BY 4.0, DOI 10.24432/C5BW33), {file.name}, lines of known customers",
        user_name="customer",
        names=names,
        log=log,
        lines={
            Feature("quantity", "dense"): np.log1p(lines["Quantity"]).astype(np.float32),
            Feature("price", "dense"): np.log1p(np.maximum(lines["UnitPrice"], 0)).astype(np.float32),
        },
        products=_products(codes, lines["Description"][first_line], lines["UnitPrice"][first_line]),
        users={},
        contexts={Feature("country", rows=len(countries)): country, **clock(log.time)},
        counted=("family", "noun", "opening"),
    )


def _read(file: Path) -> pa.Table:
    if not file.is_file():
        raise UserError(f"online-retail: no file {file}; download it from {PAGE} and give its path")
    readers = {".csv": _read_csv, ".xlsx": _read_xlsx, ".parquet": pq.read_table}
    if file.suffix.lower() not in readers:
        raise UserError(f"online-retail: {file} ends in {file.suffix!r}, wanted one of {', '.join(readers)}")
    try:
        table = readers[file.suffix.lower()](file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"online-retail: {file} cannot be read ({str(error).splitlines()[0]}); download it again"
        ) from error
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise UserError(
            f"online-retail: {file} has no column {missing[0]!r}, it has {', '.join(table.column_names[:12])}; "
            "rename its columns as UCI does"
        )
    return table.select(list(COLUMNS))


def _read_csv(file: Path) -> pa.Table:
    with open(file, "rb") as stream:
        encoding = "utf8" if stream.read(3) == b"\xef\xbb\xbf" else "latin-1"  # latin-1 decodes any byte
    return pyarrow.csv.read_csv(
        file,
        read_options=pyarrow.csv.ReadOptions(encoding=encoding),
        convert_options=pyarrow.csv.ConvertOptions(column_types=COLUMNS, strings_can_be_null=True),
    )


def _read_xlsx(file: Path) -> pa.Table:
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise UserError(
            "online-retail: reading XLSX needs openpyxl; run `pip install 'opengem[data]'` or save the sheet as CSV"
        ) from error
    rows = load_workbook(file, read_only=True).active.iter_rows(values_only=True)
    header = [str(name) for name in next(rows)]
    columns = zip(*rows, strict=True)
    numbers = ("Quantity", "UnitPrice")
    return pa.table(
        {
            name: pa.array(values if name in numbers else [None if v is None else str(v) for v in values])
            for name, values in zip(header, columns, strict=True)
        }
    )


def _purchases(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The kept lines; InvoiceDate in int64 seconds, CustomerID as int64."""
    customer = pc.cast(
        pc.cast(pc.if_else(pc.equal(table["CustomerID"], ""), None, table["CustomerID"]), "float64"), "int64"
    )
    kept = pc.and_(pc.is_valid(customer), pc.greater(table["Quantity"], 0))
    kept = pc.and_(kept, pc.invert(pc.starts_with(table["InvoiceNo"], "C")))
    columns = {name: table[name] for name in COLUMNS} | {
        "CustomerID": customer,
        "InvoiceDate": _times(table["InvoiceDate"]),
    }
    return {name: pc.filter(column, kept) for name, column in columns.items()}


def _times(dates: pa.ChunkedArray) -> pa.ChunkedArray:
    """int64 seconds of ISO dates, or of month/day/year as in the CSV that spreadsheets save."""
    try:
        slashes = "/" in str(dates[0]) if len(dates) else False
        parsed = pc.strptime(dates, "%m/%d/%Y %H:%M", "s") if slashes else pc.cast(dates, pa.timestamp("s"))
    except pa.ArrowInvalid as error:
        raise UserError(
            f"online-retail: InvoiceDate: {error}; wanted 2010-12-01 08:26:00 or 12/1/2010 8:26 in every line"
        ) from error
    return pc.cast(parsed, "int64")


def _products(codes: np.ndarray, descriptions: np.ndarray, prices: np.ndarray) -> dict[Feature, np.ndarray]:
    """family: the digits of the stock code, shared by colour variants; noun and opening: last and first word."""
    words = [str(text).split() if text else [] for text in descriptions]
    band = np.concatenate([[0], 1 + np.searchsorted(PRICE_BANDS, prices)])
    return {
        **_vocabulary("family", [re.match(r"\d*", code)[0] or code for code in codes]),
        **_vocabulary("noun", [w[-1] if w else "" for w in words]),
        **_vocabulary("opening", [w[0] if w else "" for w in words]),
        Feature("price_band", rows=len(PRICE_BANDS) + 2): band,
    }


def _vocabulary(name: str, values: Sequence[str]) -> dict[Feature, np.ndarray]:
    """`[1 + number of products]` ids of strings: 0 for the unknown product and for an empty string."""
    known, ids = np.unique(["", *values], return_inverse=True)
    return {Feature(name, rows=len(known)): ids}
