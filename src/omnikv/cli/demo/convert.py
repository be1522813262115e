"""A GGUF file as a directory in the safetensors format: `python -m omnikv.cli.demo.convert GGUF DIRECTORY`.

The weights are written in float32, with the tokenizer and its chat template beside them. Loading from GGUF takes half
a minute; loading what this writes takes under a second.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def convert(gguf: Path, into: Path) -> None:
    """Nothing; `into` holds the model, its files on the disk for good."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # What was loaded is plain float32 already; saving is refused while the model says that it is quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    into.mkdir()
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    for path in into.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def main() -> None:
    """Convert the file named on the command line."""
    convert(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
