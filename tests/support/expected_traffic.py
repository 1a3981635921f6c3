"""What a ring of workers sends, and what a forecast says of it."""

WORKERS = 4


def ring(nbytes, workers=WORKERS):
    return 2 * (workers - 1) / workers * nbytes


def other(said, where):
    return sum(each.bytes_sent for each in said.others if each.where == where)
