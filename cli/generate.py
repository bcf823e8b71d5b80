"""`kllm generate`: the answer of a real model to one prompt, as it is made."""

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from kllm.cli.console import interrupted
from kllm.cli.options import AsJson, Device, Dtype, ExpertPlacement, Layout, Load, Model

if TYPE_CHECKING:
    from kllm.core import Request
    from kllm.models.load import ResolvedModel
    from kllm.models.tokenizer import Tokenizer


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    model: Model = "smollm2-135m",
    system: Annotated[str, typer.Option(help="System message; default: none.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token always.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the k likeliest; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from this much probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Least share of the likeliest token's probability.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divides the logits of tokens already seen.")
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtracted once from tokens already in the output.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtracted for each time a token is in the output.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes the draws repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given repeatedly.")
    ] = None,
    layout: Layout = "",
    expert_placement: ExpertPlacement = "",
    load: Load = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer a prompt with a real model, streaming."""
    from dataclasses import replace

    from kllm.config import EngineConfig, ParallelConfig, SchedulerConfig
    from kllm.core import SamplingParams
    from kllm.engine.engine import Engine
    from kllm.models.load import resolve
    from kllm.parallel.layout import parse

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    config = EngineConfig(
        model=model,
        load=load,  # type: ignore[arg-type]  # EngineConfig checks it
        device=device,
        dtype=dtype,
        parallel=parse(layout) if layout else ParallelConfig(),
        expert_placement=expert_placement,
    )
    resolved = resolve(config)
    ids = prompt_ids(_tokenizer(resolved), prompt, system, raw)
    # One request: the KV pool holds it and nothing else.
    length = min(len(ids) + max_tokens, resolved.config.max_position_embeddings)
    seats = SchedulerConfig(max_batch=1)
    cut_short = False
    with closing(Engine(replace(config, max_model_len=length, scheduler=seats))) as engine:
        request = engine.add(ids, params, detokenize=True)
        try:
            for piece in engine.stream(request):
                if not as_json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except KeyboardInterrupt:  # what there is remains worth having
            cut_short = True
        finally:
            if not as_json:
                typer.echo()  # an error begins a line of its own
    if as_json:
        typer.echo(_document(resolved, request))
    if cut_short:
        raise interrupted(f"interrupted after {len(request.output_ids)} of {max_tokens} tokens")


def prompt_ids(tokenizer: "Tokenizer", prompt: str, system: str, raw: bool) -> list[int]:
    """The prompt as the model reads it.

    Raises:
        ConfigError: when both `raw` and `system` are given, or there is no chat template.
    """
    from kllm.errors import ConfigError

    if raw:
        if system:
            raise ConfigError("--system needs the chat template; leave out --raw")
        return tokenizer.encode(prompt)
    if tokenizer.chat_template is None:
        raise ConfigError("this model has no chat template; add --raw to continue the text")
    messages = [{"role": "system", "content": system}] if system else []
    return tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}])


def _tokenizer(resolved: "ResolvedModel") -> "Tokenizer":
    from kllm.errors import ConfigError
    from kllm.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolved)
    if tokenizer is None:
        raise ConfigError(
            f"{resolved.display_name} has no tokenizer; generate needs a model folder or GGUF "
            "file that has one, or the preset smollm2-135m"
        )
    return tokenizer


def _document(resolved: "ResolvedModel", request: "Request") -> str:
    import json

    return json.dumps(
        {
            "model": resolved.display_name,
            "prompt_tokens": len(request.prompt_ids),
            "output_tokens": len(request.output_ids),
            "output_ids": request.output_ids,
            "finish_reason": request.finish_reason,
            "text": request.text,
        },
        ensure_ascii=False,
        indent=1,
    )
