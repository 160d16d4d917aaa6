"""The command of scripts/generate.py: text of a trained language model, as it is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inference.load import Exported
from inference.options import GenerateOptions
from inference.run_config import configure
from recipes.causal_lm import CausalLM
from recipes.data.text.tokenizers import Characters
from recipes.huggingface import generated, positions_of
from trainer.config.options import parse
from trainer.errors import RunError, UserError
from trainer.terminal import on_error_stream


@on_error_stream()
def generate(arguments: list[str]) -> int:
    """Print ``n`` texts, word by word; the speed goes to the error stream."""
    options, overrides = parse(arguments, GenerateOptions, "overrides")
    generation(options.find(), options, overrides)
    return 0


def generation(exported: Exported, options: GenerateOptions, overrides: Sequence[str]) -> list[str]:
    """Print ``n`` texts, word by word, and return them; of a causal model they begin with the prompt.

    With ``chat`` the prompt is a user's message, and the texts are the answers.

    Raises:
        UserError: the tokenizer has no chat template, the model generates no text, or the options do not suit it.
        RunError: the model's outputs are not finite.
    """
    from transformers import AutoTokenizer

    run = configure(exported, overrides, with_data=False)
    recipe, device = run.config.recipe, run.hardware.device
    causal = isinstance(recipe, CausalLM)
    if not getattr(recipe, "generates", False):
        other = "scripts/predict.py" if "classes" in exported.config else "scripts/evaluate.py"
        raise UserError(
            f"run={exported.given} is a {exported.recipe}, which cannot generate text; "
            f"give a run of {', '.join(options.recipes())}, or use {other}"
        )
    own, tokenizer = exported.tokenizer(), AutoTokenizer.from_pretrained(exported.folder)
    # What training here puts around a text: nothing, but the end of T5's input. A folder alone may be of another
    # program's model, which wants what its tokenizer adds, such as the beginning of a text.
    adds = not causal or exported.run is None
    prompt = options.prompt
    if options.chat:
        if not (causal and tokenizer.chat_template):
            raise UserError(f"chat=true: the tokenizer of run={exported.given} has no chat template", "chat=false")
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        adds = False  # the template has them
    continued = causal and not options.chat
    try:
        # An error of ours names the characters that the text lacks. If verbose, transformers would warn of a long
        # prompt, which is cropped here.
        is_own = isinstance(own, Characters)
        tokens = own.encode(prompt) if is_own else tokenizer.encode(prompt, verbose=False, add_special_tokens=adds)
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers library has no type for its own
            raise
        raise UserError(
            f"prompt={options.prompt!r} has what the model's tokenizer does not know; give another"
        ) from None
    if not tokens:
        raise UserError(f"prompt={options.prompt!r} has no token for the model's tokenizer; give another")
    exported.check_tokens("prompt=", 1 + max(tokens))
    if not causal and "<extra_id_" not in options.prompt:
        print("warning: the prompt has no gap to fill, such as <extra_id_0>", file=sys.stderr)
    if own.unknown in tokens:
        print("warning: parts of the prompt are unknown to the tokenizer", file=sys.stderr)
    ids = torch.tensor([tokens], dtype=torch.int64)
    network = exported.network(run.config.precision.loaded_dtype)
    # Under the names that it has in training, which precision.modules and the recipe's blocks may use.
    run.in_precision(nn.ModuleDict({recipe.name: network, "network": network}) if causal else network)
    torch.manual_seed(options.seed)
    written, texts, started = 0, [], time.perf_counter()
    for number in range(1, options.n + 1):
        if options.n > 1:
            print(f"--- {number} of {options.n}")
        if continued:
            print(options.prompt, end="", flush=True)
        with run.config.precision.autocast(device):
            count, text = _write(network, tokenizer, ids.to(device), options)
        written += count
        texts.append(options.prompt * continued + text)
    seconds = time.perf_counter() - started
    print(f"{written / seconds:.1f} tokens/s ({written} in {seconds:.1f} s)", file=sys.stderr)
    return texts


def _write(network: Any, tokenizer: Any, ids: Tensor, options: GenerateOptions) -> tuple[int, str]:
    """Generate and print one text, token by token; return its number of tokens, and the text.

    Each token follows from the last ones that the context has room for. From where it is full, these are at other
    positions for every token, so that their keys and values are computed again.

    Args:
        network: of transformers.
        tokenizer: of transformers.
        ids: int64, 1 × tokens: what is continued, or the input of an encoder.
        options: ``max_new_tokens``, ``temperature``, ``top_k`` and ``top_p`` are used; the text also ends at
            the network's own end token.

    Raises:
        RunError: the model's outputs are not finite.
    """
    from transformers import TextStreamer

    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
    printed: list[str] = []

    class Shown(TextStreamer):
        """Leaves out what only ends the text, but not the sentinels of T5, which are special tokens too."""

        def put(self, value: Tensor) -> None:
            if self.next_tokens_are_prompt or int(value.flatten()[0]) not in ends:
                super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            printed.append(text)
            super().on_finalized_text(text, stream_end)

        def end(self) -> None:
            self.next_tokens_are_prompt = True  # of the next call

    shown, written, ended = Shown(tokenizer, skip_prompt=True), 0, False
    decodes = network.config.is_encoder_decoder  # a T5, whose positions are relative
    context = None if decodes else positions_of(network.config)
    stop = network.generation_config.eos_token_id
    known_ids = min(network.config.vocab_size, 1 + max(tokenizer.get_vocab().values()))  # its rows may be padded
    drawn: dict[str, Any] = {"do_sample": options.temperature > 0}
    if options.temperature > 0:
        drawn |= {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    try:
        while written < options.max_new_tokens and not ended:
            left, known = options.max_new_tokens - written, ids if context is None else ids[:, -context:]
            ids = generated(
                network,
                known,
                known_ids,
                max_new_tokens=left if context is None else min(left, max(1, context - known.shape[1])),
                pad_token_id=min(ends, default=0),
                streamer=shown,
                **drawn,
            )
            written += ids.shape[1] - (1 if decodes else known.shape[1])
            ended = decodes or int(ids[0, -1]) in (stop if isinstance(stop, list) else [stop])
    except FloatingPointError as error:
        raise RunError(f"{error}; generate with precision=fp32, or from earlier weights") from error
    TextStreamer.end(shown)
    return written, "".join(printed)
