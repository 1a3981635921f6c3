"""Server process: `python -m gossamer.train.parameter_server`, started by gossamer run, configured by the environment.

With --spare it first warms up, and then waits for its environment on standard input: see standby.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

from gossamer.base.peer_ops import SERVER, Peer
from gossamer.comm.environment.emulated_host import enter_host
from gossamer.comm.environment.run_settings import LARGEST_FRAME_BYTES, dedicated_servers, run_name
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.runtime.signal_handlers import is_ignored
from gossamer.comm.tls_contexts import run_tls
from gossamer.errors import ConnectError
from gossamer.train.parameter_server.server import host
from gossamer.train.parameter_server.standby import wait_for_role, warm_up

POLL_SECONDS = 0.5


def main(arguments: Sequence[str]) -> None:
    """Serve until the launcher ends this process, or has ended itself. Raises ConnectError."""
    if "--spare" in arguments:
        warm_up()
        if not wait_for_role():
            return
    enter_host()
    serve()


def serve() -> None:
    number, token = int(os.environ["GOSSAMER_SERVER"]), run_token()
    if token is None:
        raise ConnectError(
            "This server has no token, so any process that reaches its port could train with it. Start it by `gossamer "
            "run --servers 1`, which makes one, or set GOSSAMER_TOKEN_FILE."
        )
    address, port = dedicated_servers()[number]
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())  # how the launcher ends servers
    if not is_ignored(signal.SIGINT):
        signal.signal(signal.SIGINT, lambda *_: stopped.set())
    endpoint = TcpEndpoint(
        Credentials(me=Peer(SERVER, number), token=token, run=run_name(), largest_frame_bytes=LARGEST_FRAME_BYTES),
        EndpointOptions(address=address, port=port, tls=run_tls()),
    )
    service = endpoint.start(host(number, os.environ.get("GOSSAMER_JOURNAL"), keep_serving=True))
    launcher = os.environ.get("GOSSAMER_LAUNCHER_PID")
    while not stopped.wait(POLL_SECONDS) and not service.landed():
        if launcher is not None and os.getppid() != int(launcher):
            break
    if service.landed():
        service.wait()  # raises its error
    endpoint.close()


if __name__ == "__main__":
    main(sys.argv[1:])
