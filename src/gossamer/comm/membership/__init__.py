"""Membership of an elastic run: numbered views of its workers, created by one coordinator.

view          View and Member: a numbered set of workers with their ranks and addresses
messages      JSON messages between the workers and the coordinator
member        worker side: send reports, poll for news, close the connections of a finished view
coordinator   coordinator side: process reports and answer polls
next_view     when a view ends, the members of the next view, and evictions
known_worker  coordinator's record of one worker, and the evidence that it is alive; differing newcomers
invitations   links by which other machines join: their content, and the coordinator's decision
journal       log from which a restarted coordinator recovers
"""

from gossamer.comm.membership.view import Member, View

__all__ = ["Member", "View"]
