"""Check the source texts, train the tokenizer, write one token file.

The folder given must hold the plain texts of two packages, which this repository
does not carry: Jane Austen's six novels out of Debian's package r-cran-janeaustenr
1.0.0-1 (MIT; public-domain texts) and Shakespeare's works out of the Python package
shakespeare 0.6 (code MIT, content CC BY 2.5). `sources.sha256` names the files.
"""

import re
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from texts import BOS, EOS, PAD, SPEAKER, SPEECH, Document, documents, verify
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
VOCABULARY = 2048
# Their order gives their ids: padding 0, begin 1, end 2, as nemotron_h expects.
SPECIAL = [PAD, BOS, EOS, SPEAKER, SPEECH]

console = Console()


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts the begin token before a text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marks = re.compile("|".join(SPECIAL))
    core.train_from_iterator((marks.split(text) for text in texts), trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SPEAKER, SPEECH],
        chat_template=(HERE / "chat_template.jinja").read_text(),
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, found: list[Document], held_out: bool
) -> torch.Tensor:
    """Return one side of the split as a row of token ids; documents start at bos."""
    ids: list[int] = []
    side = [document for document in found if document.held_out == held_out]
    name = "held out" if held_out else "training"
    for document in track(side, name, console=console):
        encoding = tokenizer.backend_tokenizer.encode(
            document.text, add_special_tokens=False
        )
        ids += encoding.ids
    return torch.tensor(ids, dtype=torch.int16)


def main(
    sources: Annotated[Path, typer.Argument(help="Folder with the plain texts.")],
    out: Annotated[Path, typer.Argument(help="Folder for tokens and tokenizer.")],
    seed: Annotated[int, typer.Option(help="Seed for where documents end.")] = 0,
) -> None:
    """Prepare the training data."""
    found = list(documents(verify(sources, HERE / "sources.sha256"), seed))
    tokenizer = train_tokenizer([d.text for d in found if not d.held_out])
    sides = {
        "train": encode(tokenizer, found, held_out=False),
        "held_out": encode(tokenizer, found, held_out=True),
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(sides, out / "tokens.safetensors")
    tokenizer.save_pretrained(out / "tokenizer")
    for name, ids in sides.items():
        count = sum(d.held_out == (name == "held_out") for d in found)
        console.print(f"{name}: {count} documents, {len(ids)} tokens")


if __name__ == "__main__":
    typer.run(main)
