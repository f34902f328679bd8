"""Turns what a user names into a model: one grammar for `plan` and `audit`.

`target.find_target` decides which model is meant, `models` builds it: without weights for a plan (`models.build`), for
real for an audit (`models.load`). Nothing is imported here, so that `--help` can quote `FORMS` without loading torch.
"""

from __future__ import annotations

FORMS = (
    "a known name (Llama-3.1-8B), a name on the Hugging Face Hub (org/model), a config.json or the folder it is in, a "
    "model type of transformers (llama), or MODULE:FACTORY (with arguments: MODULE:FACTORY?layers=4)"
)
"""Every form in which a model can be named, in the words of `--help` and of error messages."""

INSTALL_HF = "pip install 'lowtide[hf]' (or without installing: uvx --from 'lowtide[hf]' lowtide ...)"
"""What to do where transformers or PEFT is missing."""
