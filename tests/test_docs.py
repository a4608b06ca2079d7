"""The documentation is true: its tables name tests, functions, messages and numbers that exist."""

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, TrainerCallback, TrainingArguments

import dpllm
from dpllm import DPTrainer
from dpllm.privacy.risk import attack_risk
from tests.conftest import tiny_llama_config

ROOT = Path(__file__).parents[1]
PACKAGE, COLUMNS = Path(dpllm.__file__).parent, ("input_ids", "labels")
CELLS = re.compile(r"^\| (?P<cause>.+?) \| (?P<handled>.+?) \| (?P<tests>.+?) \| (?P<scope>[a-z; ]+) \|$", re.MULTILINE)
SCOPES = {"construction", "refusal", "check", "open point"}


def attacks() -> list[dict[str, str]]:
    """The classes of docs/attacks.md, without the heads of its tables and without the table of trusted code."""
    text = (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8").split("\n## Trusted code\n")[0]
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    assert len(CELLS.findall(text)) == len(lines), "a line of a table has another number of cells"
    return [row.groupdict() for row in CELLS.finditer(text) if row["scope"] != "scope"]


def functions_in(path: Path) -> set[str]:
    """Names as pytest has them: of functions, and of methods behind their class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return functions | {
        f"{kind.name}::{node.name}" for kind in classes for node in kind.body if isinstance(node, ast.FunctionDef)
    }


def named() -> list[str]:
    """Every test that the tables name."""
    return sorted({name for row in attacks() for name in re.findall(r"`(tests/[^`]+)`", row["tests"])})


@pytest.mark.parametrize("file", sorted({name.split("::")[0] for name in named()}))
def test_every_test_of_the_tables_of_attacks_exists(file):
    """A test that was renamed or deleted takes its class with it."""
    assert {name.split("::", 1)[1] for name in named() if name.startswith(f"{file}::")} <= functions_in(ROOT / file)


def test_every_class_of_attacks_has_a_scope_and_a_test():
    """A way to an untrue ε without a test comes back; each class is listed once."""
    rows = attacks()
    assert {scope for row in rows for scope in row["scope"].split("; ")} <= SCOPES
    assert not [row["cause"] for row in rows if "`tests/" not in row["tests"]]
    assert len({row["cause"] for row in rows}) == len(rows)


# ------------------------------------------------------------ the site


def site_hooks():
    """The functions that fill the pages of the site; without MkDocs, which only the site's build needs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files"):
            patch.setitem(sys.modules, name, SimpleNamespace(File=None, Files=None))
        spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


HOOKS = site_hooks()
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, *(place for place in HOOKS.ELSEWHERE.values() if place.endswith(".md"))])
def test_every_page_is_made(page):
    """Each link of it leads to a file, and each count is known; `mkdocs build --strict` finds the rest."""
    text = HOOKS.with_counts((ROOT / page).read_text(encoding="utf-8"))
    HOOKS.with_links(text, page, page.removeprefix("docs/"))


def test_every_page_is_in_the_navigation():
    """MkDocs says this too, when the site is built."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": ([\w/]+\.md)$", settings, re.MULTILINE))
    assert listed == {page.removeprefix("docs/") for page in PAGES} | {
        name for name in HOOKS.ELSEWHERE if name.endswith(".md")
    }


def test_every_statement_about_another_library_has_its_source():
    """A cell of the comparison has a link, says that it was tried, or is a plain "no"; each link has its address."""
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    table = page[page.index("| | dpllm | Opacus") :].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line.startswith("|")]
    others = [(row[0], cell) for row in rows for cell in row[2:]]
    assert rows and all(len(row) == 5 for row in rows)
    for name, cell in others:
        assert "][" in cell or "tried" in cell or cell in ("no", "yes", "not checked"), (name, cell)
    used = re.findall(r"\]\[([\w-]+)\]", page)
    given = re.findall(r"^\[([\w-]+)\]: https://", page, re.MULTILINE)
    assert set(used) == set(given) and len(given) == len(set(given))


@pytest.mark.parametrize("page", [*PAGES, *(place for place in HOOKS.ELSEWHERE.values() if place.endswith(".md"))])
def test_lines_of_a_page_are_short(page):
    """At most 120 characters, but for rows of tables, pictures and addresses, which cannot be broken, and code."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not re.match(r"\||!\[|\[[\w-]+\]: ", line)]
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("name", sorted(HOOKS.COUNTS))
def test_the_counts_are_of_things_that_exist(name):
    """A renamed class would count as none."""
    assert HOOKS.COUNTS[name]() > 0


def test_links_lead_to_pages_or_name_the_file():
    """Also from a page that is not in docs/; pictures stay pictures."""
    text = "[a](../docs/models.md#b) ![c](utility.svg) [`__init__.py`](../dpllm/__init__.py)"
    assert HOOKS.with_links(text, "benchmarks/results.md", "results.md") == (
        "[a](models.md#b) ![c](utility.svg) `dpllm/__init__.py`"
    )
    assert HOOKS.with_links("```\n[a](b.md)\n```", "docs/models.md", "models.md") == "```\n[a](b.md)\n```"
    with pytest.raises(ValueError, match=r"b\.md"):
        HOOKS.with_links("[a](b.md)", "docs/models.md", "models.md")


def test_the_reference_has_every_public_name():
    """And no other."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: dpllm\.(\w+)$", page, re.MULTILINE)) == sorted(set(dpllm.__all__) - {"__version__"})


def text_of(node: ast.expr) -> str | None:
    """Return a text as it is in the source, each value of it as “…”; None where it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or "…") + (text_of(node.right) or "…")
    return None


@cache
def texts() -> list[str]:
    """Return every text of the package's source."""
    nodes = (node for path in (ROOT / "dpllm").rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    return [text for node in nodes if isinstance(node, ast.expr) and (text := text_of(node)) is not None]


def messages() -> list[str]:
    """Return the messages of the page about errors."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


@pytest.mark.parametrize("message", messages())
def test_every_message_of_the_page_about_errors_is_in_the_source(message):
    """By the first words of its longest part between two values; the rest of a message may be reworded."""
    words = " ".join(max(message.split("…"), key=len).split()[:5])
    assert any(words in text for text in texts())


@pytest.mark.parametrize("target", [0.5, 1.0, 3.0, 8.0])
def test_the_table_of_odds_is_the_computed_one(target):
    """For the plan that the page names, rounded away from the truth."""
    page = (ROOT / "docs" / "concepts" / "epsilon.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {target:g} \| ([\d.]+) % \| ([\d.]+) in 100 \| 1 in ([\d ]+) \|$", page, re.MULTILINE)
    rate = 1024 / 42_061
    noise = dpllm.calibrate_noise_multiplier(target, 1e-6, rate, 410)
    risk = attack_risk([(dpllm.dp_sgd(sampling_rate=rate, noise_multiplier=noise), 410)])
    computed = (100 * risk.bayes_success[0.5], 100 * risk.true_positive_rate[0.01], 1 / risk.reconstruction[1e-6])
    shown = [float(value.replace(" ", "")) for value in row]
    assert all(low <= high <= 1.06 * low for low, high in zip(computed[:2], shown[:2], strict=True))
    assert shown[2] <= computed[2] <= 1.06 * shown[2]


def test_the_tables_of_formats_are_those_of_the_catalogue():
    """`make format` writes them again after a format is added."""
    spec = importlib.util.spec_from_file_location("format_tables", ROOT / "docs" / "format_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = tables.README.read_text(encoding="utf-8")
    assert tables.with_tables(page) == page


# ------------------------------------------------------------ the files of a step

STEP = (ROOT / "docs" / "concepts" / "private_step.md").read_text(encoding="utf-8")
STAGES = re.findall(r"^\| .+ \| `(dpllm/\S+\.py)` \| `(\S+)` \|$", STEP, re.MULTILINE)


class Traced(TrainerCallback):
    """Notes the functions of the package that the third step calls, in the order of their first calls."""

    def __init__(self):
        self.order = {}

    def on_step_end(self, args, state, control, **kwargs):
        """Begin after the second step, and end after the third."""
        sys.setprofile(self.note if state.global_step == 2 else None)

    def note(self, frame, event, arg):
        """Note a call."""
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            place = path.relative_to(PACKAGE.parent).as_posix(), frame.f_code.co_qualname
            self.order.setdefault(place, len(self.order))


def test_a_step_passes_the_files_of_the_page_in_their_order(tmp_path):
    """Whoever reads them in this order reads what runs."""
    torch.manual_seed(0)
    rows = Dataset.from_dict({name: [[3 + (5 * i + j) % 50 for j in range(6)] for i in range(32)] for name in COLUMNS})
    traced = Traced()
    options = {"max_steps": 4, "report_to": [], "save_strategy": "no", "use_cpu": True}
    args = TrainingArguments(str(tmp_path / "run"), per_device_train_batch_size=64, **options)
    privacy = {"noise_multiplier": 1.0, "delta": 1e-2, "clip_norm": 1.0, "expected_batch_size": 16}
    model = LlamaForCausalLM(tiny_llama_config(use_cache=False))
    DPTrainer(model, args, privacy, rows, callbacks=[traced]).train()
    assert len(STAGES) > 15
    places = [traced.order.get(stage) for stage in STAGES]
    assert not [stage for stage, place in zip(STAGES, places, strict=True) if place is None]
    assert places == sorted(places)


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`(dpllm/\S+\.py)`", STEP))))
def test_every_file_of_the_page_exists(file):
    """Also those of stages that not every step passes."""
    assert (ROOT / file).is_file()
