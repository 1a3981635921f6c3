"""Membership: says which workers belong to an elastic run, in numbered views that one coordinator makes.

view          View and Member: a numbered set of workers, their ranks and addresses
messages      what workers and their coordinator say to each other, as JSON
member        a worker's side: it reports itself, waits for news, and closes what is over
coordinator   hears workers, and answers those who wait for news; its script
view_policy   when a view is over, who is in the next one, and who is put out of it
heard_worker  what the coordinator knows of one worker, and the evidence that it lives
fingerprints  what a newcomer must be like
journal       what a coordinator that is started again goes on from
resolution    which survivors finish a broken transaction with whose answers, or that all make it again
"""

from gossamer.comm.membership.view import Member, View

__all__ = ["Member", "View"]
