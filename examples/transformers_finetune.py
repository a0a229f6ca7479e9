"""Fine-tunes a small LLaMA with Hugging Face's Trainer on the files of the repository; an ordinary training script.

    torchrun --nproc-per-node 2 examples/transformers_finetune.py
    XVCOMM_REPLACE=gloo torchrun --nproc-per-node 2 examples/transformers_finetune.py

The script does not mention xvcomm: it asks torch for Gloo, or for NCCL where there are GPUs. The second command replaces Gloo
by xvcomm; `XVCOMM_REPLACE=nccl` replaces NCCL. Nothing is downloaded: the model is initialised at random and the tokenizer
has one token per byte.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


class Windows(torch.utils.data.Dataset):
    """The text cut into windows of equal length."""

    def __init__(self, ids: list[int], length: int) -> None:
        self.windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main() -> None:
    """Train, evaluate, and write the losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/transformers"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all processes")
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()

    set_seed(0)
    tokenizer = byte_tokenizer()
    text = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py")))
    data = Windows(tokenizer(text)["input_ids"], 128)
    cut = len(data) * 9 // 10
    training, held_out = torch.utils.data.Subset(data, range(cut)), torch.utils.data.Subset(data, range(cut, len(data)))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    options = TrainingArguments(
        output_dir=str(args.out), max_steps=args.steps, learning_rate=1e-3, logging_steps=1, save_strategy="steps",
        save_steps=args.steps, report_to=[], disable_tqdm=True, seed=0, use_cpu=not torch.cuda.is_available(),
        ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
    )  # fmt: skip
    options.per_device_train_batch_size = args.batch // args.accumulate // options.world_size
    options.gradient_accumulation_steps = args.accumulate
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=options,
        train_dataset=training,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.evaluate()
    if trainer.is_world_process_zero():
        group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        held = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        record = {"processes": options.world_size, "group": str(group), "losses": losses, "held_out": held[-1]}
        (args.out / "losses.json").write_text(json.dumps(record))
        print(json.dumps(record))


if __name__ == "__main__":
    main()
