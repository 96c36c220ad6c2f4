"""`keel export`: write a checkpoint as a Hugging Face model folder, and verify its log-probs."""

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from keel.cli.display.console import console


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "export",
        help="write a checkpoint as a Hugging Face model folder",
        description="Merge a checkpoint's adapter, if it has one, and write all weights with tokenizer and chat"
        " template to DIR.\n\nCHECKPOINT is the folder of a step, or of a run or its checkpoints; then the newest"
        " complete step is exported.\nDIR is created only after the model was read back and gave the log-probs of the"
        " checkpoint.\n\nThe exit code is 0 if the model was written and verified, and 2 after an error, which leaves"
        " DIR unchanged.",
        epilog="examples:\n  keel export runs/first out\n"
        "  keel export runs/first/checkpoints/step_20 out --dtype bfloat16",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="the folder of a checkpoint or a run")
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write the model to")
    parser.add_argument("--dtype", help="float32, bfloat16, float16 or float64 (default: as in the checkpoint)")
    parser.add_argument("--base", help="folder or name of the adapter's base model, if it was moved")
    parser.add_argument("--force", action="store_true", help="replace an existing model in DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export a checkpoint and print the folder, the log-prob difference and how to load the model."""
    from keel.training.model.export import export

    exported = export(args.checkpoint, args.folder, dtype=args.dtype, base=args.base, force=args.force)
    merged = (
        f"adapter merged into {exported.base}"
        if exported.kind == "adapter"
        else f"all weights, trained from {exported.base}"
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    table.add_row("checkpoint", f"{exported.checkpoint}: {merged}")
    table.add_row("written to", f"{exported.folder} ({exported.size_bytes / 1e6:,.1f} MB, {exported.dtype})")
    table.add_row(
        "verified",
        f"read back from disk; at {exported.compared_positions} positions all log-probs are within"
        f" {exported.max_logprob_difference:.1e} of the checkpoint's",
    )
    table.add_row("load with", f'transformers.AutoModelForCausalLM.from_pretrained("{exported.folder}")')
    table.add_row("or", f"vllm serve {exported.folder}")
    console().print(table)
    return 0
