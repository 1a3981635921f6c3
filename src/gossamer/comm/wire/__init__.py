"""Wire protocol between peers, sans-IO: bytes in, frames out; no sockets, no threads, no clock.

connection_state   one end of a connection as a state machine: handshake, numbering and reading of frames
authentication     credentials as claims of the handshake, keys of the frames, comparison of run, recipe and layout
frames             a frame: fixed header, control record, tensor bytes, and a tag behind each
frame_mac          the tags: keyed BLAKE2b over everything of a frame so far, POLYVAL for payloads
messages           Push, Pull and their answers as control records (msgspec) and back
tensor_codec       tensors as bytes and back, without a copy
"""
