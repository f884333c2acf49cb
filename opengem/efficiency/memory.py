"""Memory of a training process by category."""

from __future__ import annotations


def categories(job, peak_bytes: int) -> dict[str, int]:
    """Bytes: tables (rows and their state), dense parameters, optimiser, buffers, and the rest of the peak.

    job: a `job.Job`. The rest, "activations", holds gradients, 16-bit copies and workspaces as well; on a CPU, where
    the peak is that of the process, also the interpreter and its libraries.
    """
    optimiser = sum(
        value.nbytes for state in job.optimizer.state.values() for value in state.values() if hasattr(value, "nbytes")
    )
    held = {
        "tables": job.embeddings.num_bytes(),
        "dense_parameters": sum(p.nbytes for p in job.model.parameters()),
        "optimiser": optimiser,
        "buffers": sum(b.nbytes for b in job.model.buffers()),
    }
    return held | {"activations": max(0, peak_bytes - sum(held.values()))}
