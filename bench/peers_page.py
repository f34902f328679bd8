"""Audit other libraries' set-ups on representative architectures, and write docs/peers.md from the records.

    python bench/peers_page.py [--run]

With `--run`, what the records lack is audited first; each architecture takes about a minute for all engines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lowtide.auditing.grades import Grade
from lowtide_zoo.peers import PEERS
from lowtide_zoo.records import Record, read_records
from lowtide_zoo.survey import Engine, run_survey

DOCS = Path(__file__).parent.parent / "docs"
RECORDS = DOCS / "zoo" / "peers.jsonl"

ENGINES = ("transformers", *PEERS, "lowtide")

ARCHITECTURES = (
    "llama", "qwen3_vl", "mixtral", "qwen3", "gemma3", "mllama", "t5", "bert", "whisper", "llava", "qwen3_moe", "gpt2",
    "deepseek_v3", "mistral", "phi3", "gpt_oss", "gemma3n", "qwen2_5_vl", "idefics3", "internvl", "vit", "clip",
    "siglip", "blip-2", "wav2vec2", "dinov2", "mamba2", "falcon_h1", "modernbert", "gemma4",
)  # fmt: skip
"""Dense and sparse text models, encoders, encoder-decoders, vision, speech, state spaces, and several towers."""

INTRODUCTION = """\
# Which set-up is right for which architecture

We audited the set-ups that people get from other libraries, by calling the libraries' own code on tiny models with
random weights, on a CPU. A cell has the worst [grade](audit.md#grades) over all modes of an engine, and the checks
that have it; what is listed failed twice, the second time with different weights and a different batch.
`bench/peers_page.py` writes this page from [the records](zoo/peers.jsonl), and `lowtide audit TYPE --engine ENGINE`
repeats a cell.

| engine | what is judged |
|---|---|
| transformers | `gradient_checkpointing_enable()`, in its default mode and reentrant |
| trl | the flag as SFTTrainer sets it, and its selective checkpointing |
| accelerate | the FSDP2 plugin with `activation_checkpointing=True`, not sharded |
| deepspeed | transformers' flag with `deepspeed.checkpointing.checkpoint` |
| peft-kbit | LoRA on a base from `prepare_model_for_kbit_training`, not quantized |
| lowtide | `recompute`, and tiles where the architecture takes them |
"""


def main() -> None:
    if "--run" in sys.argv[1:]:
        for architecture in ARCHITECTURES:
            for engine in ENGINES:
                run_survey([architecture], Engine(engine), RECORDS, workers=1, resume=True)
                sys.stderr.write(f"{architecture} {engine}\n")
    (DOCS / "peers.md").write_text(page(read_records(RECORDS)))


def page(records: list[Record]) -> str:
    found = {(record.model_type, record.engine): record for record in records}
    engines = [engine for engine in ENGINES if any(record.engine == engine for record in records)]
    lines = [INTRODUCTION, f"| architecture | {' | '.join(engines)} |", f"|---|{'---|' * len(engines)}"]
    for architecture in ARCHITECTURES:
        row = [found.get((architecture, engine)) for engine in engines]
        if all(record is not None for record in row):
            lines.append(f"| {architecture} | {' | '.join(cell(record) for record in row if record is not None)} |")
    versions = sorted({json.dumps(record.versions, sort_keys=True) for record in records if record.versions})
    lines += [
        "",
        f"With {'; '.join(', '.join(f'{k} {v}' for k, v in json.loads(text).items()) for text in versions)}.",
        "",
    ]
    return "\n".join(lines)


def cell(record: Record) -> str:
    if record.status != "audited":
        return record.status
    worst = record.worst
    if worst is None:
        return "right"
    names = dict.fromkeys(failure["name"] for failure in record.failures if failure["grade"] == worst)
    return worst.value if worst is Grade.UNTIDY else f"**{worst}**: {', '.join(names)}"


if __name__ == "__main__":
    main()
