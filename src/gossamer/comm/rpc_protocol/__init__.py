"""Protocol of rpc: the connections between peers, sans-IO: bytes in, frames out; no sockets, no threads, no clock.

connection_state   one end of a connection as a state machine: handshake, numbering and parsing of frames
credentials        credentials as claims of the handshake, keys of the frames, comparison of run, recipe and layout
frames             frame format: fixed header, control record, tensor bytes, and a tag behind each
frame_mac          the tags: keyed BLAKE2b over the frame so far, POLYVAL for payloads
messages           conversion of Push, Pull and their answers to and from control records (msgspec)
tensor_codec       conversion of tensors to and from bytes, without a copy
"""
