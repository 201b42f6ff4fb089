"""`unisono federate FILE`: its flags here, the run in `federated.play`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.spec.errors import UsageError
from unisono.spec.runs import CONFIG
from unisono.verbs import CommandCall, Parser, Result
from unisono.verbs._recipe import RecipeVerb, loaded
from unisono.verbs.train import resumed
from unisono_contrib.verbs._listening import address_of

if TYPE_CHECKING:
    from unisono.config import Loaded, Recipe, Resolved
    from unisono_contrib.config.sections.federated import FederatedConfig


PLACE = "federation.json"
"""In the run folder: where a server listens."""


class FederateVerb(RecipeVerb):
    """Train one model across clients that keep their data, in rounds.

    The recipe's [federated] section says how many clients there are, which of them train in a round, on which samples,
    and what the server makes of what they send. By itself all clients are simulated in this process. With --serve they
    are processes elsewhere, which an organisation starts with --join and the same recipe.
    """

    name = "federate"

    def flags(self, parser: Parser) -> None:
        super().flags(parser)
        parser.add_argument(
            "--resume", metavar="RUN", help="continue the run in this folder, or from this checkpoint of it"
        )
        parser.add_argument(
            "--workers", type=int, default=1, metavar="N", help="processes that train simulated clients (1)"
        )
        server, client = parser.add_argument_group("server"), parser.add_argument_group("clients")
        server.add_argument(
            "--serve", metavar="ADDRESS:PORT", help="wait here for clients to join; port 0: any"
        )
        server.add_argument(
            "--tokens", metavar="FILE", help="TOML: a section an organisation, with its token"
        )
        server.add_argument("--certificate", metavar="PEM", help="of this server, for TLS")
        server.add_argument("--key", metavar="PEM", help="of its certificate")
        server.add_argument(
            "--expect", type=int, metavar="N", help="clients to wait for before round 1 (all)"
        )
        client.add_argument(
            "--join", metavar="ADDRESS:PORT", help="train clients for the server that listens there"
        )
        client.add_argument("--organisation", metavar="NAME", help="whose clients these are")
        client.add_argument("--token", metavar="FILE", help="file with the organisation's token")
        client.add_argument("--authority", metavar="PEM", help="certificate by which the server is known")
        client.add_argument("--clients", metavar="0-4,7", help="which clients these are")
        client.add_argument(
            "--state", metavar="DIR", help="folder for what these clients keep from round to round"
        )
        parser.add_argument(
            "--no-tls", action="store_true", help="in a network that is trusted: nothing is encrypted"
        )

    def run(self, call: CommandCall) -> Result:
        args, file = call.args, call.args.file
        if args.serve and args.join:
            raise _usage("one process is the server or has clients", "--serve or --join")
        resume, checkpoint = resumed(args.resume) if args.resume is not None else (None, "")
        if resume is not None and file is None:
            file = str(resume / CONFIG)
        resolved = resolved_for_clients(loaded(call, file, demo=args.demo))
        self._check_split(call, resolved)
        self._check_workers(call, resolved)
        if call.settings.dry_run:
            return _would_federate(call, resolved)
        if args.join:
            return _join(call, resolved)
        from unisono.config import resolved_toml
        from unisono.verbs.train.folder import make_run_dir, unmake
        from unisono_contrib.federated import play

        clients_of = _clients_of(call, resolved) if args.serve else _workers_of(call, resolved)
        run_dir = resume or make_run_dir(resolved.recipe, resolved_toml(resolved))
        try:
            record = play.play(
                resolved, run_dir, resume is not None, checkpoint, call.settings.note, clients_of
            )
        except BaseException:
            if resume is None and not (run_dir / play.METRICS).exists():
                unmake(run_dir)  # it never began
            raise
        call.settings.say(play.in_words(record))
        return record

    @staticmethod
    def _check_split(call: CommandCall, resolved: "Resolved") -> None:
        from unisono_contrib.spec.federated import SPLITS

        split = _section(resolved.recipe).split
        if SPLITS.read(split).apart and not (call.args.serve or call.args.join):
            raise UsageError(
                f"split={split} is of clients with data of their own, and here all are simulated on one",
                where="federated.split", fix="split = iid, or --serve and --join", code="C06",
            )  # fmt: skip

    @staticmethod
    def _check_workers(call: CommandCall, resolved: "Resolved") -> None:
        workers = call.args.workers
        if workers < 1 or (workers > 1 and (call.args.serve or call.args.join)):
            raise _usage(
                f"--workers {workers} is of simulated clients, one or more", "--workers 2, or without it"
            )
        if workers > 1 and (resolved.recipe.launch.threads_per_rank or 1) > 1:
            raise UsageError(
                "processes of simulated clients compute with one thread each",
                where="--workers, launch.threads_per_rank", fix="launch.threads_per_rank = 1", code="C06",
            )  # fmt: skip


def _clients_of(call: CommandCall, resolved: "Resolved") -> "Callable[[Any, str, Path], Any]":
    """What makes the clients of a server. Raises UsageError for flags that lack something."""
    from unisono_contrib.federated.organisations import organisations_in, server_tls

    args, recipe = call.args, resolved.recipe
    if args.tokens is None:
        raise _usage("a server has to know its organisations", "--tokens FILE")
    tls = None if _is_plain(call, args.certificate and args.key, "--certificate PEM --key PEM") else (
        server_tls(args.certificate, args.key)
    )  # fmt: skip
    organisations, (address, port) = organisations_in(args.tokens), address_of(args.serve, "--serve")

    def clients_of(parts: "Any", fingerprint: str, run_dir: Path) -> "Any":
        import json

        from unisono.observe.files import write_whole
        from unisono_contrib.federated.alike import alike, most_bytes
        from unisono_contrib.federated.remote import RemoteClients, listen

        config = _section(recipe)
        same, most = alike(recipe, parts, fingerprint), most_bytes(parts)
        listener = listen(address, port, organisations, same, config.clients, most, tls)
        write_whole(run_dir / PLACE, json.dumps({"address": address, "port": listener.port}) + "\n")
        call.settings.note(f"serves at {address}:{listener.port}")
        clients = RemoteClients(
            listener, config.patience, call.settings.note, f"{recipe.name}/{run_dir.name}"
        )
        try:
            clients.wait_for(args.expect or config.clients, config.patience)
        except BaseException:
            clients.close()
            raise
        return clients

    return clients_of


def _workers_of(call: CommandCall, resolved: "Resolved") -> "Callable[[Any, str, Path], Any] | None":
    """What makes simulated clients of several processes; None for those of this one."""
    if call.args.workers == 1:
        return None

    def clients_of(parts: "Any", fingerprint: str, run_dir: Path) -> "Any":
        from unisono_contrib.federated.server import client_host
        from unisono_contrib.federated.workers import WorkerClients

        return WorkerClients(client_host(resolved, parts), call.args.workers)

    return clients_of


def _join(call: CommandCall, resolved: "Resolved") -> Result:
    """Train clients of this process until the run is over."""
    from unisono_contrib.federated.organisations import client_tls, numbers_in, token_in

    args = call.args
    for flag in ("organisation", "token", "clients"):
        if getattr(args, flag) is None:
            raise _usage(f"who joins says --{flag}", f"--{flag}")
    numbers_in(args.clients, "--clients")
    tls = None if _is_plain(call, args.authority, "--authority PEM") else client_tls(args.authority)
    token, (address, port) = token_in(args.token), address_of(args.join, "--join")
    from unisono.train.data.load import load
    from unisono_contrib.federated.alike import alike, most_bytes
    from unisono_contrib.federated.joined import JoinPlace, serve
    from unisono_contrib.federated.keep import ClientKeeper
    from unisono_contrib.federated.server import RunParts, client_host

    recipe = resolved.recipe
    place = JoinPlace(
        address, port, args.organisation, token, args.clients, tls, _section(recipe).patience
    )  # fmt: skip
    corpus = load(recipe.data, recipe.model)
    parts = RunParts.of(resolved, corpus)
    host = client_host(resolved, parts)
    if host.keeps:
        host.keeper = ClientKeeper(None if args.state is None else Path(args.state), call.settings.note)
        if args.state is None:
            call.settings.note("what these clients keep is lost with this process: --state DIR would keep it")
    played = serve(
        place, alike(recipe, parts, corpus.fingerprint), host, most_bytes(parts), call.settings.note
    )
    call.settings.say(f"the run is over: {played} tasks played")
    return {"tasks": played, "organisation": args.organisation, "clients": args.clients}


def _is_plain(call: CommandCall, files: "Any", flags: str) -> bool:
    """Whether nothing is encrypted. Raises UsageError where that is not said."""
    if files:
        return False
    if not call.args.no_tls:
        raise _usage(
            "links between organisations are encrypted", f"{flags}; --no-tls in a network that is trusted"
        )
    return True


def _section(recipe: "Recipe") -> "FederatedConfig":
    from unisono_contrib.config.sections.federated import FederatedConfig

    return FederatedConfig.of(recipe)


def _usage(what: str, fix: str) -> UsageError:
    return UsageError(what, where="unisono federate", fix=fix, code="C04")


def resolved_for_clients(recipe: "Loaded") -> "Resolved":
    """The recipe as clients play it: a local step is one micro-batch, and what counts in steps counts in rounds. Raises
    ConfigProblems."""
    from unisono import config

    train = recipe.recipe.train
    try:
        section = _section(recipe.recipe)
    except LookupError:
        raise UsageError(
            "the recipe has no [federated] section, which says who the clients are",
            where="federated", fix="[federated] with clients = 10", code="C06",
        ) from None  # fmt: skip
    steps = {"steps": section.rounds, "micro_batch": train.global_batch}
    as_rounds = recipe.recipe.model_copy(update={"train": train.model_copy(update=steps)})
    origins = {**recipe.origins, "train.steps": "derived: federated.rounds"}
    return config.resolve(as_rounds, recipe.plan, 1, origins)


def _would_federate(call: CommandCall, resolved: "Resolved") -> Result:
    from unisono.config import as_json, resolved_toml

    recipe = resolved.recipe
    section = _section(recipe)
    lines = [
        resolved_toml(resolved),
        f"would train  {recipe.name}, {section.rounds} rounds of {section.clients} clients, {section.strategy}",
        f"out          {Path(recipe.out.dir, recipe.name)}",
    ]
    return call.would({"recipe": as_json(recipe), "origins": resolved.origins}, *lines)
