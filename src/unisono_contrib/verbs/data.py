"""`unisono data FILE --at ADDRESS:PORT`: a data host."""

import signal
import socket
from contextlib import suppress

from unisono.spec.errors import UsageError
from unisono.verbs import CommandCall, Parser, Result
from unisono.verbs._recipe import RecipeVerb, loaded
from unisono_contrib.verbs._listening import address_of


class DataVerb(RecipeVerb):
    """Read, decode and tokenise a recipe's data on this host, for ranks elsewhere.

    Ranks of the same recipe name this host in `data.hosts`. Any number of hosts may serve them; each can be killed and
    started at any time, and no sample is lost or read twice. It serves until Ctrl-C, or
    SIGTERM.
    """

    name = "data"

    def flags(self, parser: Parser) -> None:
        super().flags(parser)
        parser.add_argument(
            "--at",
            default="127.0.0.1:0",
            metavar="ADDRESS:PORT",
            help="where ranks reach it; port 0: any (127.0.0.1:0)",
        )

    def run(self, call: CommandCall) -> Result:
        recipe, (address, port) = (
            loaded(call, call.args.file, demo=call.args.demo).recipe,
            address_of(call.args.at, "--at"),
        )
        data = recipe.data.model_copy(update={"hosts": ()})
        if call.settings.dry_run:
            return call.would({"at": call.args.at}, f"would serve {data.source} at {call.args.at}")
        from unisono.train.data.load import load
        from unisono_contrib.train.data.data_host import DataHost
        from unisono_contrib.train.data.host_secret import secret_path, token_at
        from unisono_contrib.train.data.host_words import facts_of

        token, corpus = token_at(secret_path(data), makes=True), load(data, recipe.model)
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((address, port), family=family, backlog=128)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {call.args.at}: {error.strerror or error}",
                where="--at", fix="an address of this host, and a free port", code="L01",
            ) from error  # fmt: skip
        host = DataHost(listener, token, corpus, facts_of(corpus, data), data.cache)
        call.settings.note(f"serves {len(corpus.train):,} samples at {address}:{host.port}")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):  # how it is meant to end
            host.wait()
        host.close()
        call.settings.note(f"served {host.samples:,} samples")
        return {"at": f"{address}:{host.port}", "samples": host.samples}
