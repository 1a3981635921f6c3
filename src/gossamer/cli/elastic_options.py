"""Options of elastic runs: how many workers, and where a run is joined."""

from __future__ import annotations

from typing import Any

import click

from gossamer.launch.job import WorkerRange, read_worker_range

HOST_PORT = "{text!r} is no address of a coordinator. Write HOST:PORT, such as 10.0.0.1:29600"
EVERYWHERE = ("0.0.0.0", "::", "*")


class WorkerCount(click.ParamType[int | WorkerRange]):
    """A whole number, or for an elastic run MIN:MAX or MIN:MAX:FIRST, as a WorkerRange."""

    name = "N or MIN:MAX"
    fixed = click.IntRange(1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | WorkerRange:
        if isinstance(value, str) and ":" in value:
            try:
                return read_worker_range(value)
            except ValueError as error:
                self.fail(str(error), param, ctx)
        return self.fixed.convert(value, param, ctx)


def read_address(text: str) -> tuple[str, int]:
    """HOST and PORT. Raises BadParameter."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port[:6]) > 65535:
        raise click.BadParameter(HOST_PORT.format(text=text))
    return host.strip("[]"), int(port)


def check_address(context: click.Context, option: click.Parameter, text: str | None) -> tuple[str, int] | None:
    address = None if text is None else read_address(text)
    if address is not None and address[0] in EVERYWHERE:
        raise click.BadParameter(
            f"{address[0]} is no address by which other machines reach this one. Write its own, such as 10.0.0.1:29600"
        )
    return address


join_option = click.option(
    "--join", metavar="HOST:PORT", callback=check_address, help="Add workers to an elastic run; needs --token-file."
)
listen_option = click.option(
    "--listen",
    metavar="HOST:PORT",
    callback=check_address,
    help="Where an elastic run is joined from other machines.  [default: the interface's address, or loopback]",
)


def first_workers(workers: int | WorkerRange) -> int:
    return workers if isinstance(workers, int) else workers.initial


def most_workers(workers: int | WorkerRange) -> int:
    return workers if isinstance(workers, int) else workers.most
