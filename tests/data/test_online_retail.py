"""The Online Retail importer: small tables in each format, and the real file where it lies beside the repository."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from opengem.data import online_retail
from opengem.data.schema import Schema
from opengem.data.store import Events, Samples
from opengem.errors import UserError

REAL = Path(__file__).parents[2].parent / "shared/data/uci_online_retail/online_retail.parquet"
HEADER = ["InvoiceNo", "StockCode", "Description", "Quantity", "InvoiceDate", "UnitPrice", "CustomerID", "Country"]
ROWS = [
    ["536365", "85123A", "WHITE HANGING HEART", 6, "2010-12-01 08:26:00", 2.55, "17850.0", "United Kingdom"],
    ["536365", "POST", "POSTAGE", 1, "2010-12-01 08:27:00", 18.0, "17850.0", "United Kingdom"],
    ["C536379", "85123A", "WHITE HANGING HEART", -1, "2010-12-01 09:41:00", 2.55, "17850.0", "United Kingdom"],
    ["536380", "85123B", "RED HANGING HEART", 2, "2010-12-01 10:00:00", 2.55, None, "France"],
    ["536381", "22412", "METAL SIGN, CAFÉ £5", -3, "2010-12-01 10:05:00", 0.0, "12583.0", "France"],
    ["536382", "85123B", "RED HANGING HEART", 2, "2011-12-09 12:50:00", 3.25, "12583.0", "France"],
    ["536383", "22412", None, 2, "2011-12-09 12:50:00", 0.3, "17850.0", "United Kingdom"],
]


def as_parquet(folder: Path, rows=ROWS, header=HEADER) -> Path:
    pq.write_table(
        pa.table(dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))), folder / "retail.parquet"
    )
    return folder / "retail.parquet"


def as_csv(folder: Path) -> Path:
    """As spreadsheets save it: month/day/year, Latin-1, no decimals in the customer number."""
    lines = [",".join(HEADER)]
    for invoice, code, text, quantity, date, price, customer, country in ROWS:
        year, month, day = date[:10].split("-")
        when = f"{int(month)}/{int(day)}/{year} {int(date[11:13])}:{date[14:16]}"
        customer = customer[:-2] if customer else ""
        lines.append(f'{invoice},{code},"{text or ""}",{quantity},{when},{price},{customer},{country}')
    (folder / "retail.csv").write_bytes("\r\n".join(lines).encode("latin-1"))
    return folder / "retail.csv"


def as_xlsx(folder: Path) -> Path:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(HEADER)
    for row in ROWS:
        date = np.datetime64(row[4]).astype("datetime64[us]").item()
        book.active.append(
            [int(row[0]) if row[0].isdigit() else row[0], *row[1:4], date, row[5], row[6] and float(row[6]), row[7]]
        )
    book.save(folder / "retail.xlsx")
    return folder / "retail.xlsx"


@pytest.mark.parametrize("make", [as_parquet, as_csv, as_xlsx])
def test_every_format_gives_the_same_log(tmp_path, make):
    """Cancellations, unknown customers and quantities below 1 are left out; an invoice has its last line's time."""
    shop = online_retail.load(make(tmp_path))
    log = shop.log
    assert shop.names.tolist() == [12583, 17850] and log.num_products == 5 - 1 + 1
    assert log.user.tolist() == [1, 1, 0, 1] and log.basket.tolist() == [0, 0, 1, 2]
    first = int(np.datetime64("2010-12-01T08:27:00", "s").astype(int))
    assert log.time[:2].tolist() == [first, first] and log.time[2] == log.time[3]
    assert log.product.tolist() == [2, 4, 3, 1]
    products = {f.name: v.tolist() for f, v in shop.products.items()}
    assert products["family"] == [0, 1, 2, 2, 3]  # 22412, 85123, 85123, POST
    assert products["noun"] == [0, 0, 1, 1, 2] and products["opening"] == [0, 0, 3, 2, 1]
    assert products["price_band"][0] == 0 and products["price_band"][1] == 1
    contexts = {f.name: v.tolist() for f, v in shop.contexts.items()}
    assert contexts["hour"] == [8, 8, 12, 12] and contexts["weekday"] == [2, 2, 4, 4]


def test_faulty_files_are_one_line(tmp_path):
    with pytest.raises(UserError, match="no file"):
        online_retail.load(tmp_path / "nowhere.csv")
    (tmp_path / "retail.json").write_text("{}")
    with pytest.raises(UserError, match="'.json', wanted one of .csv"):
        online_retail.load(tmp_path / "retail.json")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match="cannot be read"):
        online_retail.load(tmp_path / "broken.parquet")
    with pytest.raises(UserError, match="no column 'CustomerID'"):
        online_retail.load(as_parquet(tmp_path, header=[n.replace("CustomerID", "Customer ID") for n in HEADER]))
    late = [[*row[:4], "yesterday", *row[5:]] for row in ROWS]
    with pytest.raises(UserError, match="InvoiceDate.*wanted 2010-12-01"):
        online_retail.load(as_parquet(tmp_path, late))


@pytest.mark.skipif(not REAL.is_file(), reason="the Online Retail file does not lie in ../shared")
def test_real_file(tmp_path, capsys):
    online_retail.build(tmp_path, file=REAL)
    assert "4,339 customers, 397,924 purchases of 3,665 products" in capsys.readouterr().out
    schema = Schema.load(tmp_path)
    rows = Samples.open(tmp_path, schema, events=Events.open(tmp_path, schema))
    first, last = rows.split("test")
    columns = rows.read(first, last)
    assert columns["timestamp"][0] >= np.datetime64("2011-11-01", "s").astype(int)
    assert columns["click"].mean() == pytest.approx(0.2) and columns["cut.purchase"].min() > 0
    assert columns["product_sold"].max() > columns["product_sold"].min() > 0
