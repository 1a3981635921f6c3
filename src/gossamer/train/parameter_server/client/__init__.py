"""Parameter-server client: the worker's side, as scripts.

client         Client: gather, push_pull, apply_pull; begin, barrier, end; its membership at all servers
periodic_client  PeriodicClient: changes of several local steps, by server; unsent ones are kept
requests       pushes and pulls to all servers, and errors in their answers
shard_client   one server's part: gradient buffer, compressor state, parameter replica
partition      assignment of tensor rows to servers
step_result    outcome, bytes and seconds of a step
"""
