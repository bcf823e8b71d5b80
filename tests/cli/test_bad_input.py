"""Bad input through the entry point: one sentence on stderr, nothing on stdout, the right code."""

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kllm import env
from kllm.cli.app import main
from kllm.results import store
from tests.results import samples

USAGE, FAILURE, HARDWARE, INTERRUPTED = 2, 1, 3, 130
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
TRACE_LINE = b'{"timestamp": %s, "input_length": %s, "output_length": 2}\n'
DEEP = "[" * 100_000  # nests deeper than a parser goes
BROKEN_GZIP = bytearray(gzip.compress(b"request" * 1000 + bytes(range(256))))
BROKEN_GZIP[20:40] = b"\xff" * 20
LATENCY = ("bench", "latency", "--device", "cpu", "--batch", "1", "--isl", "8", "--osl", "2")
TINY = ("--model", "deepseek-v4", "--scale", "tiny", "--device", "cpu")
BENCH = (*LATENCY, *TINY)
TUNE = ("tune", *TINY, "--isl", "8", "--osl", "4", "--concurrency", "2", "--requests", "4")
RING = ("bench", "ring-vs-allgather", *TINY)
GENERATE = ("generate", "--device", "cpu")
MEASURED = Path(__file__).parents[2] / "results" / "measured"
RECIPE = str(MEASURED / "cpu" / "tune-deepseek-v4-tiny-tight-slo.toml")

Prepare = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """A command line, run in an empty folder, and how it must end."""

    args: tuple[str, ...]
    code: int
    says: str
    prepare: Prepare = lambda folder: None


def case(name: str, args: tuple[str, ...], code: int, says: str, *prepare: Prepare) -> object:
    return pytest.param(Case(args, code, says, *prepare), id=name)


def text(name: str, content: str) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return prepare


def data(name: str, content: bytes) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return prepare


def folder(name: str) -> Prepare:
    return lambda at: (at / name).mkdir(parents=True)


def model_folder(weights: Callable[[Path], None] | None = None) -> Prepare:
    def prepare(folder: Path) -> None:
        text("m/config.json", json.dumps(CONFIG))(folder)
        if weights is not None:
            weights(folder / "m" / "model.safetensors")

    return prepare


def one_tensor(file: Path) -> None:
    save_file({"model.norm.weight": torch.ones(32)}, file)


def shard_without_a_name(folder: Path) -> None:
    model_folder()(folder)
    text("m/model.safetensors.index.json", '{"weight_map": {"model.norm.weight": 5}}')(folder)


def truncated(file: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(64, 32)}, file)
    file.write_bytes(file.read_bytes()[:-100])


def truncated_gguf(folder: Path) -> None:
    (folder / "m.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\xff")


def result(name: str, **changes: object) -> Prepare:
    def prepare(folder: Path) -> None:
        rng = np.random.default_rng(0)
        times = samples.times(np.exp(rng.normal(0, 0.01, 12)).tolist())
        store.save(samples.bench(metrics={"tpot_ms": times}, **changes), folder / name)

    return prepare


def wrong_field(folder: Path) -> None:
    result("r.json")(folder)
    document = json.loads((folder / "r.json").read_text())
    (folder / "r.json").write_text(json.dumps(document | {"model": 5}))


def two_models(folder: Path) -> None:
    result("a.json")(folder)
    result("b.json", model="another")(folder)


def two_equal(folder: Path) -> None:
    result("a.json")(folder)
    result("b.json")(folder)


MODEL_CASES = [
    case(
        "unknown-model", (*LATENCY, "--model", "deepseek-v44"), USAGE, "did you mean deepseek-v4 "
    ),
    case("no-such-folder", (*LATENCY, "--model", "./none"), USAGE, "no model folder or file"),
    case("no-such-gguf", (*LATENCY, "--model", "none.gguf"), USAGE, "no model folder or file"),
    case(
        "broken-config",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "config.json is not valid JSON",
        text("m/config.json", "{"),
    ),
    case(
        "config-not-text",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "config.json is not valid JSON",
        lambda f: (text("m/x", "")(f), (f / "m/config.json").write_bytes(b"\xff\xfe\x00"))[0],
    ),
    case(
        "config-lacks-a-field",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "hidden_size is missing",
        text("m/config.json", '{"model_type": "llama"}'),
    ),
    case(
        "config-with-a-wrong-type",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "hidden_size",
        text("m/config.json", json.dumps(CONFIG | {"hidden_size": "wide"})),
    ),
    case(
        "unknown-family",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "'mamba' is not supported",
        text("m/config.json", '{"model_type": "mamba"}'),
    ),
    case(
        "no-config",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "no config.json",
        text("m/readme", ""),
    ),
    case(
        "no-weights",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "holds no tensors",
        model_folder(),
    ),
    case(
        "truncated-safetensors",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "it may be truncated",
        model_folder(truncated),
    ),
    case(
        "missing-tensor",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "the checkpoint lacks",
        model_folder(one_tensor),
    ),
    case("truncated-gguf", (*LATENCY, "--model", "m.gguf"), USAGE, "m.gguf", truncated_gguf),
    case(
        "scale-of-real-weights",
        (*LATENCY, "--model", "./m", "--scale", "layers:1"),
        USAGE,
        "would cut real weights",
        model_folder(one_tensor),
    ),
    case(
        "config-nests-too-deep",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "config.json is not valid JSON",
        text("m/config.json", DEEP),
    ),
    case(
        "config-is-a-folder",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "config.json cannot be read",
        folder("m/config.json"),
    ),
    case(
        "layers-without-end",
        (*LATENCY, "--model", "./m", "--load", "random"),
        USAGE,
        "num_hidden_layers must be a whole number in 1..10000",
        text("m/config.json", json.dumps(CONFIG | {"num_hidden_layers": 10**9})),
    ),
    case(
        "size-beyond-any-model",
        (*LATENCY, "--model", "./m", "--load", "random"),
        USAGE,
        "vocab_size must be",
        text("m/config.json", json.dumps(CONFIG | {"vocab_size": 10**400})),
    ),
    case(
        "config-not-finite",
        (*LATENCY, "--model", "./m", "--load", "random"),
        USAGE,
        "rope_theta must be finite, got inf",
        text("m/config.json", json.dumps(CONFIG | {"rope_theta": float("inf")})),
    ),
    case(
        "shard-without-a-name",
        (*LATENCY, "--model", "./m"),
        USAGE,
        "cannot be read as a shard index",
        shard_without_a_name,
    ),
    case("nobodys-home", (*LATENCY, "--model", "~no-such-user/m"), USAGE, "no model folder"),
    case("name-too-long", (*LATENCY, "--model", "m" * 5000), USAGE, "File name too long"),
    case("no-layer", (*BENCH, "--scale", "layers:0"), USAGE, "layers:0"),
    case("too-many-layers", (*BENCH, "--scale", "layers:9999"), USAGE, "the model has"),
    case("unknown-scale", (*BENCH, "--scale", "huge"), USAGE, "unknown scale 'huge'"),
    case("too-large", (*BENCH, "--scale", "full"), HARDWARE, "use a smaller scale"),
]
BENCH_CASES = [
    case("seed-negative", (*BENCH, "--seed", "-1"), USAGE, "seed"),
    case("seed-huge", (*BENCH, "--seed", str(10**30)), USAGE, "seed"),
    case("kv-dtype", (*BENCH, "--kv-dtype", "int3"), USAGE, "unknown KV dtype 'int3'"),
    case("dtype", (*BENCH, "--dtype", "int8"), USAGE, "unknown dtype 'int8'"),
    case("device", (*BENCH, "--device", "tpu"), USAGE, "tpu"),
    case("batch-is-text", (*BENCH, "--batch", "many"), USAGE, "--batch takes whole numbers"),
    case("batch-is-zero", (*BENCH, "--batch", "0"), USAGE, "batch"),
    case("batch-is-negative", (*BENCH, "--batch=-1"), USAGE, "batch"),
    case("isl-is-negative", (*BENCH, "--isl", "-5"), USAGE, "at least 1 prompt"),
    case("osl-is-negative", (*BENCH, "--osl", "-5"), USAGE, "2 output tokens"),
    case("isl-past-the-model", (*BENCH, "--isl", "99999999"), USAGE, "positions"),
    case(
        "fidelity-isl-past-the-model",
        ("bench", "fidelity", *TINY, "--isl", "99999999"),
        USAGE,
        "4096 positions",
    ),
    case("batch-beyond-any", (*BENCH, "--batch", "9" * 30), USAGE, "--batch takes numbers up to"),
    case(
        "requests-beyond-any",
        ("bench", "throughput", *TINY, "--requests", "9" * 30),
        USAGE,
        "num_requests must be in 1..",
    ),
    case(
        "output-is-a-folder",
        (*BENCH, "--output", "r.json"),
        USAGE,
        "r.json: it is a folder",
        folder("r.json"),
    ),
    case("not-utf-8", (*BENCH, "--output", "a\udcff"), USAGE, r"'a\udcff' is not UTF-8"),
    *(
        case(
            f"trace-{name}",
            ("bench", "throughput", *TINY, "--workload", file),
            USAGE,
            says,
            data(file, content),
        )
        for name, file, content, says in (
            ("deep", "t.jsonl", DEEP.encode(), "line 1 cannot be read"),
            ("broken-gzip", "t.jsonl.gz", bytes(BROKEN_GZIP), "cannot be read"),
            ("long-cell", "t.csv", b"TIMESTAMP\n" + b"9" * 200_000, "line 2 cannot be read"),
            ("long-header", "t.csv", b"9" * 200_000, "line 1 cannot be read"),
            ("infinite-length", "t.jsonl", TRACE_LINE % (b"0", b"1e999"), "line 1 cannot be"),
            ("infinite-time", "t.jsonl", TRACE_LINE % (b"1e999", b"8"), "not finite"),
            ("time-not-a-number", "t.jsonl", TRACE_LINE % (b"NaN", b"8"), "not finite"),
        )
    ),
    case("ring-isl-past-the-model", (*RING, "--isl", "999M"), USAGE, "4096 positions"),
    case("ring-without-attention", (*RING, "--attention", ","), USAGE, "needs a model, a link"),
    case(
        "output-under-a-file",
        (*BENCH, "--output", "file/x.json"),
        USAGE,
        "file",
        text("file", ""),
    ),
    case(
        "workload-and-isl",
        ("bench", "throughput", *TINY, "--workload", "chat", "--isl", "8"),
        USAGE,
        "--workload replaces",
    ),
    case(
        "concurrency-zero",
        ("bench", "throughput", *TINY, "--concurrency", "0"),
        USAGE,
        "concurrency",
    ),
    case(
        "unknown-workload",
        ("bench", "throughput", *TINY, "--workload", "chatt"),
        USAGE,
        "chatt",
    ),
    case(
        "broken-trace",
        ("bench", "throughput", *TINY, "--workload", "t.jsonl"),
        USAGE,
        "t.jsonl",
        text("t.jsonl", "{"),
    ),
]
LAYOUT_CASES = [
    case("ranks-beyond-memory", (*BENCH, "--layout", "dp=4096"), HARDWARE, "4096 ranks on this"),
    case("ranks-beyond-all", (*BENCH, "--layout", "dp=100000"), USAGE, "at most 4096"),
    case("tune-world", (*TUNE, "--world", "1000000007"), USAGE, "at most 4096"),
    case("tp-that-does-not-cut", (*BENCH, "--layout", "tp=3"), USAGE, "does not divide"),
    case(
        "fidelity-of-no-layout",
        ("bench", "fidelity", *TINY, "--layout", "tp=3"),
        USAGE,
        "does not divide",
    ),
    case("link-unknown", (*BENCH, "--link", "nvlink9"), USAGE, "unknown link 'nvlink9'"),
    case("tune-link", (*TUNE, "--layout", "tp=2", "--link", "nvlink9"), USAGE, "unknown link"),
    case(
        "link-not-measured",
        (*BENCH, *"--layout tp=2 --fidelity rank-slice --link measured".split()),
        USAGE,
        "kllm doctor --links",
    ),
]
TUNE_CASES = [
    case("isl-alone", ("tune", *TINY, "--isl", "8"), USAGE, "belong together"),
    case(
        "tune-workload-and-isl",
        ("tune", *TINY, "--workload", "chat", "--isl", "8"),
        USAGE,
        "both say what the load is",
    ),
    case(
        "tune-isl-text", ("tune", *TINY, *"--isl x --osl 4 --concurrency 2".split()), USAGE, "'x'"
    ),
    case("tune-no-model", ("tune",), USAGE, "--model"),
    case("slo-without-unit", (*TUNE, "--slo", "ttft=2"), USAGE, "positive time with its unit"),
    case("slo-unreadable", (*TUNE, "--slo", "ttft=fast"), USAGE, "ttft=fast"),
    case("slo-unknown", (*TUNE, "--slo", "speed=1s"), USAGE, "speed"),
    case("objective", (*TUNE, "--objective", "speed"), USAGE, "speed"),
    case("fix-unknown", (*TUNE, "--fix", "magic=1"), USAGE, "magic"),
    case("fix-without-value", (*TUNE, "--fix", "max_batch"), USAGE, "NAME=VALUE"),
    case("fix-page-size", (*TUNE, "--fix", "page_size=7"), USAGE, "page_size"),
    case("fix-kv-dtype", (*TUNE, "--fix", "kv_dtype=int3"), USAGE, "int3"),
    case(
        "fix-batch-over-budget",
        (*TUNE, "--fix", "max_batch=64", "--fix", "token_budget=16"),
        USAGE,
        "token_budget",
    ),
    case(
        "storage-server",
        (*TUNE, "--storage", "postgresql://localhost:1/x"),
        USAGE,
        "storage postgresql://localhost:1/x",
    ),
    case(
        "storage-password",
        (*TUNE, "--storage", "nonsense://me:secret@host/x"),
        USAGE,
        "storage nonsense://me:***@host/x",
    ),
    case(
        "storage-folder",
        (*TUNE, "--storage", "sqlite:///none/x.db"),
        USAGE,
        "storage sqlite:///none/x.db cannot be opened",
    ),
    case("storage-scheme", (*TUNE, "--storage", "nonsense"), USAGE, "nonsense"),
    case("tune-seed", (*TUNE, "--seed", "-1"), USAGE, "seed"),
    case("resume-nothing", (*TUNE, "--resume"), USAGE, "to resume"),
    case("tune-fidelity", (*TUNE, "--fidelity", "modelled"), USAGE, "unknown fidelity 'modelled'"),
    case("resume-unknown", (*TUNE, "--resume", "--study", "s"), USAGE, "to resume"),
    case(
        "tune-output-is-a-file",
        (*TUNE, "--output", "file"),
        USAGE,
        "file",
        text("file", ""),
    ),
]
FILE_CASES = [
    case("report-missing", ("report", "r.json"), USAGE, "cannot read r.json"),
    case("report-broken", ("report", "r.json"), USAGE, "r.json", text("r.json", "{")),
    case("report-deep", ("report", "r.json"), USAGE, "r.json is not JSON", text("r.json", DEEP)),
    case(
        "report-deep-journal",
        ("report", "r.partial.jsonl"),
        USAGE,
        "line 1 is damaged",
        text("r.partial.jsonl", DEEP + "\n"),
    ),
    case(
        "report-foreign-duration",
        ("report", "r.json"),
        USAGE,
        "unusable field of a vllm result",
        text("r.json", '{"model_id": "m", "mean_ttft_ms": 1, "duration": "long"}'),
    ),
    case("report-name-too-long", ("report", "r" * 5000), USAGE, "File name too long"),
    case(
        "expert-placement-deep",
        (*BENCH, "--layout", "dp=2,ep=2", "--expert-placement", "r.json"),
        USAGE,
        "r.json is not a usable kLLM result",
        text("r.json", '{"a":' * 100_000),
    ),
    case(
        "grid-broken-gzip",
        ("tune-quality", "g.jsonl.gz"),
        USAGE,
        "g.jsonl.gz cannot be read",
        data("g.jsonl.gz", bytes(BROKEN_GZIP)),
    ),
    case("report-wrong-field", ("report", "r.json"), USAGE, "$.model", wrong_field),
    case(
        "report-empty-folder",
        ("report", "e"),
        USAGE,
        "holds no results",
        lambda f: (f / "e").mkdir(),
    ),
    case("compare-missing", ("compare", "a.json", "b.json"), USAGE, "cannot read a.json"),
    case(
        "compare-one-missing",
        ("compare", "a.json", "c.json"),
        USAGE,
        "cannot read c.json",
        result("a.json"),
    ),
    case("grid-missing", ("tune-quality", "g.jsonl"), USAGE, "no grid in g.jsonl"),
    case("grid-broken", ("tune-quality", "g.jsonl"), USAGE, "line 1", text("g.jsonl", "{\n")),
    case(
        "expert-placement-missing",
        (*BENCH, "--layout", "dp=2,ep=2", "--expert-placement", "r.json"),
        USAGE,
        "cannot read r.json",
    ),
    case(
        "expert-placement-without-routing",
        (*BENCH, "--layout", "dp=2,ep=2", "--expert-placement", "a.json"),
        USAGE,
        "a.json holds no routing counts",
        result("a.json"),
    ),
    case("compare-models", ("compare", "a.json", "b.json"), USAGE, "model", two_models),
    case(
        "fail-on",
        ("compare", "a.json", "b.json", "--fail-on", "bad"),
        USAGE,
        "bad",
        two_equal,
    ),
    case(
        "html-in-no-folder",
        ("report", "a.json", "--html", "a.json/x.html"),
        USAGE,
        "a.json/x.html",
        two_equal,
    ),
    case("recipe-toml", ("recipes", "check", "r.toml"), USAGE, "r.toml", text("r.toml", "x = [")),
    case(
        "recipe-deep", ("recipes", "check", "r.toml"), USAGE, "r.toml", text("r.toml", "x=" + DEEP)
    ),
    case("recipe-field", ("recipes", "check", "r.toml"), USAGE, "r.toml", text("r.toml", "x=1")),
    case("recipe-missing", ("recipes", "check", "r.toml"), USAGE, "r.toml cannot be read"),
    case("recipe-unknown", ("recipes", "show", "none"), USAGE, "no recipe 'none'"),
    case("export-missing", ("recipes", "export", "r.toml", "--to", "vllm"), USAGE, "be read"),
    case("export-to", ("recipes", "export", RECIPE, "--to", "tgi"), USAGE, "known: sglang, vllm"),
    case(
        "config-key",
        ("models",),
        USAGE,
        "unknown key 'tune.trails'",
        text("kllm.toml", "[tune]\ntrails = 1"),
    ),
    case(
        "config-value",
        ("models",),
        USAGE,
        "tune.trials",
        text("kllm.toml", "[tune]\ntrials = -1"),
    ),
    case("config-toml", ("models",), USAGE, "kllm.toml", text("kllm.toml", "[tune")),
    case("config-deep", ("models",), USAGE, "kllm.toml", text("kllm.toml", "x=" + DEEP)),
    case("config-check-missing", ("config", "check", "c.toml"), USAGE, "c.toml cannot be read"),
    case(
        "config-check-broken",
        ("config", "check", "c.toml"),
        USAGE,
        "c.toml cannot be read",
        text("c.toml", "[tune"),
    ),
]
GENERATE_CASES = [
    case("empty-prompt", (*GENERATE, "--raw", ""), USAGE, "prompt"),
    case("empty-stop", (*GENERATE, "--stop", "", "hi"), USAGE, "stop"),
    case("no-tokenizer", (*GENERATE, "--model", "llama-3-8b", "hi"), USAGE, "has no tokenizer"),
    case("top-p", (*GENERATE, "--top-p", "0", "hi"), USAGE, "top_p"),
    case("min-p", (*GENERATE, "--min-p", "2", "hi"), USAGE, "min_p"),
    case("penalty", (*GENERATE, "--repetition-penalty", "0", "hi"), USAGE, "repetition_penalty"),
    case("top-p-nan", (*GENERATE, "--top-p", "nan", "hi"), USAGE, "top_p"),
    case("penalty-inf", (*GENERATE, "--presence-penalty", "inf", "hi"), USAGE, "presence_penalty"),
    case("system-raw", (*GENERATE, "--raw", "--system", "x", "hi"), USAGE, "--system"),
]
# What the option parser itself refuses; it prints the usage first.
PARSER_CASES = [
    (*TUNE, "--trials", "-1"),
    (*TUNE, "--concurrency", "0"),
    (*BENCH, "--repeats", "0"),
    (*BENCH, "--token-budget", "0"),
    (*GENERATE, "--temperature", "-1", "hi"),
    (*GENERATE, "--temperature", "nan", "hi"),
    (*TUNE, "--timeout", "-1"),
    ("models", "glm-5.2", "--layout", "dp=8,ep=8", "--memory-gb", "inf"),
    ("bench", "tp-vs-dp-attention", "--skewed", "9" * 30),
    (*GENERATE,),
    ("tuna",),
    ("models", "--what"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all cases: what the machine can do is measured once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def kllm(
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[[tuple[str, ...]], tuple[object, str, str]]]:
    """Run a command line in this process: importing torch for each would take minutes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KLLM_HOME", str(home))
    monkeypatch.delenv("KLLM_CONFIG", raising=False)
    # A slow machine would speak meanwhile.
    monkeypatch.setattr("kllm.cli.bench_progress.LINE_S", 3600.0)
    env.read.cache_clear()

    def run(args: tuple[str, ...]) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["kllm", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    yield run
    monkeypatch.undo()
    env.read.cache_clear()


@pytest.mark.parametrize(
    "bad",
    [*MODEL_CASES, *BENCH_CASES, *LAYOUT_CASES, *TUNE_CASES, *FILE_CASES, *GENERATE_CASES],
)
def test_bad_input_is_one_sentence(bad: Case, kllm: Callable, tmp_path: Path) -> None:
    bad.prepare(tmp_path)
    code, out, err = kllm(bad.args)
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert "internal error" not in err
    assert bad.says in err
    assert (code, out) == (bad.code, "")
    assert not (tmp_path / "kllm-results").exists()


@pytest.mark.parametrize("args", PARSER_CASES, ids=" ".join)
def test_the_parser_refuses_with_its_usage(args: tuple[str, ...], kllm: Callable) -> None:
    code, out, err = kllm(args)
    assert (code, out) == (USAGE, "")
    assert err.startswith("Usage: kllm")
    assert "Traceback" not in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_gpu_that_is_not_there_is_a_lack_of_hardware(kllm: Callable) -> None:
    code, out, err = kllm((*BENCH, "--device", "cuda"))
    assert (code, out) == (HARDWARE, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_kllm_config_that_is_not_there(kllm: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KLLM_CONFIG", "none.toml")
    env.read.cache_clear()
    code, out, err = kllm(("models",))
    assert (code, out) == (USAGE, "")
    assert err.startswith("error: KLLM_CONFIG names none.toml")


def test_an_slo_that_nothing_meets_and_a_study_of_another_load(kllm: Callable) -> None:
    """The study is stored and can be reported on, but is not continued as another one."""
    code, _, err = kllm((*TUNE, "--trials", "2", "--slo", "ttft=1us", "--study", "s"))
    assert code == FAILURE
    *_, last = err.strip().splitlines()
    assert last.startswith("error: no setting meets TTFT 1 us")
    assert "Traceback" not in err
    for change in (("--osl", "5"), ("--dtype", "bfloat16"), ("--model", "llama-3-8b")):
        code, out, err = kllm((*TUNE, "--slo", "ttft=1us", "--resume", "--study", "s", *change))
        assert (code, out) == (USAGE, "")
        assert err.startswith(f"error: study 's' was begun with {change[0]} ")
        assert err.count("\n") == 1
    code, out, err = kllm((*TUNE, "--slo", "ttft=1us", "--study", "s"))
    assert (code, out) == (USAGE, "")
    assert err.startswith("error: study 's' exists already")


def interrupt(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("args", "where", "says"),
    [
        (BENCH, "kllm.bench.run.run_bench", "interrupted before anything was measured\n"),
        (TUNE, "kllm.tuners.tune.prepare", "interrupted before a trial was begun\n"),
        (("models",), "kllm.models.catalog.all_presets", "interrupted\n"),
    ],
    ids=["bench", "tune", "models"],
)
def test_an_interrupt_is_one_sentence(
    args: tuple[str, ...], where: str, says: str, kllm: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, interrupt)
    assert kllm(args) == (INTERRUPTED, "", says)
