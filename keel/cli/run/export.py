"""`keel export`: a checkpoint as a plain Hugging Face folder, verified by its log-probs before it says done."""

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from keel.cli.display.console import console


def add(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "export",
        help="write a checkpoint as a plain Hugging Face folder",
        description="Merge a checkpoint's adapter, if it has one, and write all weights with tokenizer and chat"
        " template to DIR.\n\nCHECKPOINT is a step's folder, or the folder of a run or of its checkpoints: then its"
        " newest whole step.\nDIR appears only after it was read back and gave the checkpoint's log-probs.\n\n"
        "Exit code 0: written and verified; 2: refused, and DIR is as it was.",
        epilog="examples:\n  keel export runs/first out\n"
        "  keel export runs/first/checkpoints/step_20 out --dtype bfloat16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--dtype", help="float32, bfloat16, float16 or float64 (default: as in the checkpoint)")
    parser.add_argument("--base", help="where the adapter's base model is, if it moved: a folder or a name")
    parser.add_argument("--force", action="store_true", help="replace a model that is in DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export and say where it is, how far its log-probs are, and how to load it."""
    from keel.training.model.export import export

    done = export(args.checkpoint, args.folder, dtype=args.dtype, base=args.base, force=args.force)
    merged = f"adapter merged into {done.base}" if done.kind == "adapter" else f"all weights, trained from {done.base}"
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    table.add_row("checkpoint", f"{done.checkpoint}: {merged}")
    table.add_row("written to", f"{done.folder} ({done.size_bytes / 1e6:,.1f} MB, {done.dtype})")
    table.add_row(
        "verified",
        f"read back from disk, {done.compared_positions} positions x all tokens: log-probs within {done.max_logprob_difference:.1e} of the"
        " checkpoint's",
    )
    table.add_row("load it", f'transformers.AutoModelForCausalLM.from_pretrained("{done.folder}")')
    table.add_row("or", f"vllm serve {done.folder}")
    console().print(table)
    return 0
