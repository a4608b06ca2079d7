"""The program of `dpllm federation serve`: Flower's SuperLink, and in a process of its own the rounds of the server.

Place in the flow: at the server, which holds no records. `serve` starts the SuperLink and hands it a program of a few
lines; Flower starts that program, which calls `serve_rounds`. Plan, ledger, budget, report and model are those of every
federated run (`run.Server`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import filelock
import psutil

from dpllm.config import RECIPE_FILE, ConfigError, Recipe, load_recipe
from dpllm.config.mistakes import MISTAKE, tell
from dpllm.data.rows import load_records
from dpllm.methods.federated.distributed import DistributedStep
from dpllm.methods.federated.flower import QUIET, FlowerLine, require_flower
from dpllm.methods.federated.nodes import Line, NodeClients
from dpllm.methods.federated.preparing import (
    AUTHORITY,
    CERTIFICATE,
    SIGNING_KEY,
    TLS_KEY,
    agreed,
    check_deployed,
    private,
)
from dpllm.methods.federated.roster import Roster
from dpllm.methods.federated.rounds import is_secure, words_about_the_server
from dpllm.methods.federated.run import Server, held_out_of, refuse_used
from dpllm.methods.federated.secure import require_packages
from dpllm.methods.federated.wire import Signer
from dpllm.models.load import load_base_model, prepare_model
from dpllm.privacy.budget import require_room
from dpllm.privacy.plan import PrivacyPlan, format_plan
from dpllm.training.finetune import console, public_start, show
from dpllm.training.phases import Phases
from dpllm.training.shared_ledger import SharedLedger

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

APP, HOME, OPTIONS_FILE, END_FILE, ROUNDS_LOG = "flower-app", "flower-home", "serve.json", "end.json", "rounds.log"
LOG_FILE, LOCK = "superlink.log", "serve.lock"
CLIENTS_AT = "clients"
"""The ledger's fact of that name: N, and how many nodes keep their records."""
_START_SECONDS, _END_SECONDS = 120.0, 20.0
_CONNECTION = "deployment"
_PROJECT = """\
[project]
name = "dpllm-rounds"
version = "1.0.0"
description = "The rounds of a dpllm run. All of its code is in the installed dpllm"
license = "MIT"
dependencies = []

[tool.flwr.app]
publisher = "dpllm"

[tool.flwr.app.components]
serverapp = "rounds:server"
clientapp = "rounds:client"

[tool.flwr.app.config]
folder = ""
"""
_PROGRAM = '''\
"""The rounds of a dpllm run, as Flower starts them."""

from flwr.clientapp import ClientApp

from dpllm.methods.federated.serving import server_app

server = server_app()
client = ClientApp()  # answers nothing: nodes run dpllm federation node, and never a program that a server sends
'''


@dataclass(frozen=True)
class Options:
    """The choices of the server's operator that change no guarantee.

    Raises:
        ConfigError: a time is not above 0.
    """

    wait: float = 300.0
    """Seconds to wait until enough clients are there, at the start and before a round."""
    answer_within: float = 300.0
    """Seconds in which a node answers a request; later it counts as away."""
    keep_answers: str | None = None
    """A folder for the answers as the server got them, with secure aggregation only."""
    overrides: tuple[str, ...] = ()
    """Changes of the recipe that keep the plan."""
    working_folder: str | None = None
    """The folder to which relative paths of the recipe refer, in a process that Flower starts elsewhere."""

    def __post_init__(self) -> None:
        """Check the times."""
        if not (self.wait > 0 and self.answer_within > 0):
            raise ConfigError(f"--wait {self.wait:g} and --answer-within {self.answer_within:g} must be above 0")

    def save(self, path: Path) -> None:
        """Write the options for the process that Flower starts."""
        path.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Options:
        """Read them."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**values, "overrides": tuple(values["overrides"])})


# ------------------------------------------------------------------------------------------- in the process of rounds


def server_app() -> ServerApp:
    """Return Flower's entry to the rounds; its run configuration names the server's folder."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        folder = Path(str(context.run_config["folder"]))
        write_end(folder, {"pid": os.getpid()})
        code = MISTAKE  # also where a signal ends the process before the first round
        try:
            with (
                (folder / ROUNDS_LOG).open("a", encoding="utf-8", buffering=1) as log,
                contextlib.redirect_stdout(log),
                contextlib.redirect_stderr(log),
            ):
                try:
                    options = Options.load(folder / OPTIONS_FILE)
                    if options.working_folder is not None:
                        os.chdir(options.working_folder)
                    code = serve_rounds(folder, FlowerLine(grid), options)
                except Exception as error:  # in one line, as by every command; the ledger has ended
                    code = tell(error, _say)
        finally:
            write_end(folder, {"pid": os.getpid(), "code": code})

    return app


def serve_rounds(folder: Path, line: Line, options: Options) -> int:
    """Take the rounds of a deployment and release the model; return the exit code.

    Args:
        folder: the server's.
        line: to the nodes.
        options: of the operator.

    Raises:
        ConfigError, ValueError, LedgerError, BudgetError: the run cannot begin; nothing was charged.
    """
    recipe, plan, roster = checked(folder, options)
    args = check_deployed(recipe)
    phases = Phases(console, bars=not recipe.train.get("disable_tqdm"))
    show("privacy plan", [*format_plan(plan), ("who sees what", words_about_the_server(plan, roster.most_clients))])
    phases.begin("loading the model", "the server has no records")
    start = public_start(recipe, datasets.Dataset.from_dict({}), None, False, phases)
    model = prepare_model(load_base_model(start.model, start.tokenizer, None), recipe.model)
    server = Server(recipe, args, plan, model, start)
    server.most_clients = roster.most_clients
    if recipe.data.eval_path is not None:
        source = dataclasses.replace(recipe.data, path=recipe.data.eval_path, eval_path=None)
        server.held_out = held_out_of(recipe, load_records(source), start.tokenizer)
    phases.end()
    keep = _folder_for_answers(options, plan)
    signer = Signer.load(folder / SIGNING_KEY)
    clients = NodeClients(line, roster, signer, plan.hash, options.answer_within, _say, keep)
    share = share_that_must_be_there(plan)

    def ready() -> bool:
        return clients.wait_for(share, options.wait)

    phases.begin("waiting for the nodes", f"{share:.0%} of the clients at least")
    if not ready():
        raise ConfigError(
            f"fewer than {share:.0%} of the {roster.num_clients} clients came within {options.wait:g} s, and nothing "
            "was charged: start the missing nodes, or wait longer (--wait)"
        )
    phases.end()
    server.ready, server.tally = ready, clients.tally

    def note(ledger: SharedLedger) -> None:
        ledger.append_fact(CLIENTS_AT, f"{roster.num_clients} clients, whose records are at {len(list(roster))} nodes")
        ledger.append_open_point(
            "A person with records at several nodes, or under several ids, is several clients, and is protected less. "
            "No machine can compare the ids of all nodes: confirm that each person has one id at one node."
        )

    return server.carry_out(clients, phases, note)


def share_that_must_be_there(plan: PrivacyPlan) -> float:
    """Return the share of the N clients without which no cohort is drawn.

    With secure aggregation δ counts on the declared dropouts. Who is connected is known before the draw and does not
    depend on it, so a round can wait; afterwards only clients that leave during the round are missed.
    """
    event = plan.event
    return 1 - event.dropouts if isinstance(event, DistributedStep) else 1 / plan.num_units


def checked(folder: Path, options: Options) -> tuple[Recipe, PrivacyPlan, Roster]:
    """Return recipe, plan and roster of the server's folder.

    Raises:
        ConfigError, ValueError, BudgetError: they do not belong together, the output folder has a run, or the budget
            has no room.
    """
    private(folder)
    if not (folder / TLS_KEY).is_file():
        raise ConfigError(f"{folder} is the folder of a node: the server's is the one with {TLS_KEY}")
    recipe = load_recipe(folder / RECIPE_FILE, list(options.overrides))
    plan, roster = agreed(folder, recipe)
    if is_secure(plan):
        require_packages()
    refuse_used(Path(str(recipe.train["output_dir"])))
    if recipe.privacy.budget_file:
        require_room(recipe.privacy.budget_file, plan, str(recipe.privacy.dataset))
    return recipe, plan, roster


def _folder_for_answers(options: Options, plan: PrivacyPlan) -> Path | None:
    if options.keep_answers is None:
        return None
    if not is_secure(plan):
        raise ConfigError(
            "--keep-answers would write the clients' updates, which have no noise with a trusted server: it is for "
            "secure aggregation, leave it out"
        )
    folder = Path(options.keep_answers)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _say(text: str) -> None:
    print(text, flush=True)


# ------------------------------------------------------------------------------------------------------- around Flower


def serve(folder: Path, host: str, port: int, options: Options) -> int:
    """Start the SuperLink with TLS, take the rounds, and stop it; return the exit code of the rounds.

    Args:
        folder: that `dpllm federation prepare` wrote for the server.
        host: address to listen on.
        port: port to listen on.
        options: of the operator.

    Raises:
        ConfigError: Flower is missing, the folder is not a server's, or the SuperLink did not start.
    """
    require_flower()
    private(folder)
    try:
        with filelock.FileLock(folder / LOCK, timeout=0):
            return _serve(folder.resolve(), host, port, options)
    except filelock.Timeout as error:
        raise ConfigError(f"a process already serves {folder}: wait until its run has ended") from error


def _serve(folder: Path, host: str, port: int, options: Options) -> int:
    _, plan, _ = checked(folder, options)
    _folder_for_answers(options, plan)
    dataclasses.replace(options, working_folder=str(Path.cwd())).save(folder / OPTIONS_FILE)
    (folder / END_FILE).unlink(missing_ok=True)
    (folder / ROUNDS_LOG).write_text("", encoding="utf-8")
    environment = flower_environment(folder, host, port)
    with _passing_on(folder), _super_link(folder, host, port, environment):
        command = [_program("flwr"), "run", str(_app(folder)), _CONNECTION, "--run-config", f'folder="{folder}"']
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise ConfigError(f"Flower did not take the run: {(run.stderr or run.stdout).strip()[-500:]}")
        return until_the_end(folder)


def flower_environment(folder: Path, host: str, port: int) -> dict[str, str]:
    """Return the environment of Flower's processes, and write the connection that `flwr` reads.

    Args:
        folder: the server's.
        host: address of the SuperLink.
        port: port of the SuperLink.
    """
    home = folder / HOME
    home.mkdir(mode=0o700, exist_ok=True)
    reached = "127.0.0.1" if host == "0.0.0.0" else host
    text = f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\naddress = "{reached}:{port}"\n'
    text += f'root-certificates = "{folder / AUTHORITY}"\n'
    (home / "config.toml").write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


@contextlib.contextmanager
def _super_link(folder: Path, host: str, port: int, environment: dict[str, str]) -> Iterator[None]:
    """Run a SuperLink while the block runs. Ctrl-C reaches only the rounds, which end in order."""
    command = [
        *(_program("flower-superlink"), "--host", host, "--port", str(port)),
        *("--ssl-certfile", str(folder / CERTIFICATE), "--ssl-keyfile", str(folder / TLS_KEY)),
        *("--ssl-ca-certfile", str(folder / AUTHORITY), "--disable-runtime-dependency-installation"),
    ]
    with (folder / LOG_FILE).open("w", encoding="utf-8") as log:
        link = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
        )
    try:
        _until_it_listens(link, folder, host, port)
        _say(f"the SuperLink listens on {host}:{port} with TLS; its log is {folder / LOG_FILE}")
        yield
    finally:
        link.terminate()
        try:
            link.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            link.kill()


def _until_it_listens(link: subprocess.Popen[bytes], folder: Path, host: str, port: int) -> None:
    import httpx

    end = time.monotonic() + _START_SECONDS
    address = f"https://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/health"
    trusted = ssl.create_default_context(cafile=str(folder / AUTHORITY))
    while time.monotonic() < end and link.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(address, verify=trusted, timeout=5.0)
            return
        time.sleep(1.0)
    last = (folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").strip()[-500:]
    raise ConfigError(f"the SuperLink does not listen on {host}:{port}: {last or 'it said nothing'}")


def _app(folder: Path) -> Path:
    """Write the program that Flower starts; return its folder."""
    app = folder / APP
    app.mkdir(exist_ok=True)
    (app / "pyproject.toml").write_text(_PROJECT, encoding="utf-8")
    (app / "rounds.py").write_text(_PROGRAM, encoding="utf-8")
    return app


def until_the_end(folder: Path) -> int:
    """Show the output of the rounds until they have ended; return their exit code."""
    with (folder / ROUNDS_LOG).open(encoding="utf-8", errors="replace") as log:
        while True:
            end = read_end(folder)
            alive = "pid" not in end or _alive(int(end["pid"]))
            sys.stdout.write(log.read())
            sys.stdout.flush()
            if "code" in end:
                return int(end["code"])
            if not alive:
                _say("the process of the rounds ended early; the ledger has what is charged")
                return MISTAKE
            time.sleep(1.0)


@contextlib.contextmanager
def _passing_on(folder: Path) -> Iterator[None]:
    """Pass Ctrl-C and SIGTERM on to the rounds, which end after their round; before there are any, end with Flower."""

    def pass_on(number: int, frame: Any) -> None:
        end = read_end(folder)
        if "pid" not in end:
            raise KeyboardInterrupt  # there are no rounds yet
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(end["pid"]), number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and that its parent does not ask about does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def read_end(folder: Path) -> dict[str, int]:
    """Return the process of the rounds, and its exit code when it has ended; empty before it began."""
    try:
        found: dict[str, int] = json.loads((folder / END_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def write_end(folder: Path, values: dict[str, int]) -> None:
    """Write them."""
    new = (folder / END_FILE).with_suffix(".new")
    new.write_text(json.dumps(values), encoding="utf-8")
    new.replace(folder / END_FILE)


def _program(name: str) -> str:
    """Return a program of Flower, beside this interpreter."""
    return str(Path(sys.executable).parent / name)
