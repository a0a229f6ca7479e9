"""The records of a process's carrier, shared by Python and compiled code: carrier, links, rails, wires.

Python fills a record before it hands it over. From then on the compiled code that holds `CARRIER.lock` writes it, and what
a rail sends and receives at the moment the code that holds `RAIL.lock`; `outgoing.seems_due` reads some without the former.
"""

from __future__ import annotations

import numpy as np

from xvcomm.jit.record import compiled_at, python_type
from xvcomm.memory.ring import CARRIER as MOVERS
from xvcomm.memory.ring import DIRECT, GEOMETRY, MAX_LANES, MESSAGE
from xvcomm.trace.format import HEAD_WORDS, MOST_PARTS, RECORD_BYTES
from xvcomm.types.route import MAX_RAILS
from xvcomm.wire.frames import BUFFERS, CONTROL_BYTES, FRAME, HEADER, MAX_DEVICES, OPEN_WORDS

EAGER = 1024
"""Bytes received at once where a frame may begin: a header and a small payload by one system call."""

MOST_RUN = 16
"""Frames that a rail sends at once."""

UNUSED, UP, DOWN = 0, 1, 2
"""States of a rail: none yet; in use; lost, and its socket not closed yet."""

POLLED = np.dtype([("fd", "i4"), ("events", "i2"), ("revents", "i2")])
"""struct pollfd."""

TOLD_BY_KERNEL = np.dtype([
    ("flags", "u1", 7),
    ("limits", "u1"),  # bit 0: `rate` was limited by how little was sent
    ("counts", "u4", 15),
    ("round_trip", "u4"),  # microseconds that acknowledgements have taken of late
    ("windows", "u4", 8),
    ("pacing", "u8", 2),
    ("acknowledged", "i8"),  # bytes
    ("received", "u8"),
    ("segments", "u4", 2),
    ("unsent", "u4"),  # bytes that wait for the connection
    ("least_round_trip", "u4"),  # of the last minutes
    ("arrived", "u4", 2),
    ("rate", "u8"),  # bytes a second that were acknowledged of late
    ("times", "u8", 3),
    ("delivered", "u4", 2),
    ("sent", "i8"),  # bytes, and how many of these were repeated
    ("repeated", "i8"),
])  # fmt: skip
"""The beginning of Linux' struct tcp_info."""

TLS = np.dtype([(name, "i8") for name in ("read", "write", "get_error", "clear_error")])
"""Addresses of OpenSSL's functions."""

FLIGHT = np.dtype([
    ("request", "i8"),  # its number
    ("wire", "i8"),  # place in the table
    ("place", "i8"),  # of the slot
    ("bytes", "i8"),
    ("source", "i8"),  # address here of what it sends
])  # fmt: skip
"""A WRITE of a slot that was posted and has not ended."""

FLIGHTS = 2 * BUFFERS
"""Most of them on a rail."""

RDMA = np.dtype([
    ("queue", "i8"),  # addresses of the records of its queue pair, see `verbs`
    ("completions", "i8"),
    ("device", "i8"),  # index of the device, and of the other side's
    ("there", "i8"),
    ("inbox", "i8"),  # addresses of the buffers of frames to receive, and to send, and the latter's lkey
    ("outbox", "i8"),
    ("outbox_key", "i8"),
    ("inline", "i8"),  # most bytes that a request takes along
    ("sent", "i8"),  # frames since the rail came up; how many of them the other side has handled, as it has said
    ("known", "i8"),
    ("handled", "i8"),  # frames that were received and handled; how many of them the other side knows of
    ("told", "i8"),
    ("tickets", "i8", BUFFERS),  # of each buffer to send from: number of the request that has used it last
    ("flushed", "i8"),  # whether the request behind all others was posted, after a failure
    ("loopback", "i8"),  # of the queue pair that is joined with itself: addresses of its records, 0 if there is none
    ("loopback_completions", "i8"),
    ("word", "i8"),  # address and lkey of a word that it reads into, and writes from
    ("word_key", "i8"),
    ("flying", "i8"),  # bytes of all flights
    ("first", "i8"),  # number of the first flight, and of the next one
    ("next", "i8"),
    ("flights", "i8"),  # address of FLIGHTS flights, number n at n % FLIGHTS
])  # fmt: skip
"""What a rail of RDMA has instead of a socket."""

RAIL = np.dtype([
    ("lock", "i8"),  # see `locks`; first, since it outlives a connection
    ("copying", "i8"),  # whether the kernel or the device copies for the rail, and the thread does not hold the carrier's lock
    ("fd", "i8"),  # the socket; of RDMA the completion channel
    ("rdma", "i8"),  # address of an RDMA record; 0: a socket
    ("rested", "i8"),  # looks at which it was left out, since rails of RDMA carry what this one could
    ("tls", "i8"),  # address of a TLS record; 0: without
    ("channel", "i8"),  # address of OpenSSL's object, and of a buffer for one record
    ("staged", "i8"),
    ("begun", "i8"),  # whether OpenSSL has a part of a record that the socket did not take
    ("link", "i8"),
    ("path", "i8"),  # number of its path, see `paths`
    ("route", "i8"),  # of a socket: number of the first path between the same addresses
    ("state", "i8"),
    ("error", "i8"),  # why it was lost: a failure of `sockets` or `incoming`
    ("blocked", "i8"),  # the socket takes no more bytes now
    ("ping", "i8"),  # number of a PING to send, or 0; of a PONG
    ("pong", "i8"),
    ("answered", "i8"),  # number of the newest PONG
    ("asked", "i8"),  # number of a question to answer, or 0; what it is about; parts to tell, from this one to that
    ("topic", "i8"),
    ("about", "i8"),
    ("first", "i8"),
    ("last", "i8"),
    ("wanted", "i8"),  # how many parts were asked for
    ("sent", "i8"),  # bytes since the rail came up
    ("received", "i8"),
    ("repeated", "i8"),  # slots that it has sent since which lost rails had
    # how fast it is, see `delivery`
    ("told", TOLD_BY_KERNEL),
    ("told_bytes", "i8"),
    ("looked", "i8"),  # when the kernel has told that; what was sent until then, and not acknowledged
    ("sent_then", "i8"),
    ("queued", "i8"),
    ("rate", "f8"),  # bytes a nanosecond, by full connections and by slots; 0: not measured yet
    ("growth", "f8"),  # part of `rate` by which it may have become faster since, and when that last grew
    ("grown", "i8"),
    ("tried", "i8"),  # bytes that are acknowledged once the slot is delivered by which it is measured; 0: there is none
    ("tried_after", "i8"),  # bytes that were acknowledged when it took that slot, and when the kernel told so
    ("tried_since", "i8"),
    ("watched", "i8"),  # whether the end of that slot's delivery is watched for
    ("measured", "i8"),  # bytes by which it was measured
    ("full_since", "i8"),  # 0: it is not; bytes acknowledged then
    ("acknowledged", "i8"),
    ("declined", "i8"),  # whether it has left a slot to another rail, when it was looked at last
    ("chosen", "i8"),  # whether it is one of those that alone carry slots, see `LINK.chosen`
    # the frames that are being sent: one, or slots one behind the other in a ring
    ("out", "i8"),  # address of the first header; 0: none
    ("out_data", "i8"),  # of the first payload, and the bytes from there to the next one
    ("out_step", "i8"),
    ("out_wire", "i8"),  # of SLOT: the wire's place in the table
    ("out_again", "i8"),  # of SLOT: whether a lost rail had it before
    ("out_count", "i8"),  # how many; bytes of each header and payload but the last
    ("out_each", "i8"),
    ("out_size", "i8"),  # bytes of all, and how many are sent
    ("out_at", "i8"),
    ("header", FRAME),  # of frames other than SLOT, and of slots that are sent again
    ("payload", "i8", MAX_LANES),
    ("parts", "i8", 4 * MOST_RUN),  # struct iovec[2 * MOST_RUN]
    ("call", "i8", 7),  # struct msghdr
    # the frame that is being received
    ("slot_left", "i8"),  # bytes of a SLOT's payload to come, 0: no SLOT is being received
    ("slot_data", "i8"),  # where they go; 0: nowhere
    ("gathered_at", "i8"),  # when the socket is looked at again, if many bytes of the slot are to come
    ("slot_wire", "i8"),  # place in the table
    ("slot_attempt", "i8"),
    ("slot_placed", "i8"),  # whether its bytes were written into the consumer's array before
    ("slot_lane", "i8"),
    ("slot_number", "i8"),
    ("slot_message", "i8"),  # of the slot: number of its message, from 1 on, and its bytes
    ("slot_bytes", "i8"),
    ("begin", "i8"),  # of the bytes in `buffer` that are not handled yet, and their end
    ("end", "i8"),
    ("buffer", "u1", EAGER + HEADER + CONTROL_BYTES),
])  # fmt: skip
"""A connection."""

LINK = np.dtype([
    ("wires", "i8"),  # address of its wires' places in the table
    ("wire_count", "i8"),
    ("next", "i8"),  # the wire whose turn it is
    ("leave", "i8"),  # whether to send LEAVE
    ("left", "i8"),  # whether LEAVE has come
    ("ask", "i8"),  # number of a question to send, or 0; see `frames.Kind.ASK`
    ("topic", "i8"),
    ("about", "i8"),
    ("wanted", "i8"),
    ("rdma_rails", "i8"),  # how many rails of RDMA are up
    ("chosen", "i8"),  # how many rails that are up carry slots alone; 0: all carry
    ("rdma_chosen", "i8"),  # how many of them are of RDMA, which alone carry rings in GPU memory
    ("sockets", "i8", MAX_RAILS),  # addresses of the other rails that are up, and how many there are
    ("socket_count", "i8"),
    ("routes", "i8"),  # how many different ones these have
    ("failed", "i8", (MAX_RAILS, 3)),  # FAILED frames to send: number, slot, lane
    ("failed_count", "i8"),
    ("offers", "i8"),  # address of OF_LINK offers that Python has not looked at, each in another place; how many there are
    ("offer_count", "i8"),
])  # fmt: skip
"""What joins this process with another one: its wires, and what to tell over its rails."""

PARTS = 8
"""Most paths whose bytes of a message are told apart; what others carry counts for the last of these."""

SHARE = np.dtype([
    ("message", "i8"),  # its number, from 1 on
    ("count", "i8"),  # of parts
    ("parts", "i8", (PARTS, 2)),  # number of a path, and the bytes that it has carried
])  # fmt: skip
"""Which paths have carried a message, of a producer also what was sent again."""

PLACES = 1 << 16
"""Most rings that a process has with other hosts at a time."""

OF_LINK = 1 << 12
"""Most rings that two processes have with each other at a time."""

WIRE = np.dtype([
    ("link", "i8"),
    ("number", "i8"),  # by which frames name it: its place in the table, and PLACES times its earlier uses; -1: not there yet
    ("most", "i8"),  # bytes of a slot, of this ring and the earlier ones in its place
    ("name", "i8"),
    ("group", "i8"),  # see `Transport.open_ring`
    ("peer", "i8"),  # the same; -1: this side has not opened it
    ("there", "i8"),  # the other side's number; -1: not known
    ("producer", "i8"),
    ("ring", "i8"),  # address; 0: detached
    ("removed", "i8"),  # whether another ring may have its place
    ("geometry", GEOMETRY),
    ("counter", "i8"),  # addresses of the ring end's number of the next message, and of its turn
    ("turn", "i8"),
    ("replays", "i8"),  # address of the word of `RingEnd.replayed`
    ("open", "i8"),  # whether to send OPEN: 1, 2 with a request for the other side's index
    ("stop", "i8"),  # whether the other side knows the abort word, or has told of its own: see below
    ("answer", "i8"),  # whether to send STOPPED
    ("shut", "i8"),  # whether it was made after the ring had stopped, only to tell so: messages are not for it
    ("word", "i8"),  # received by a STOP, and not published yet
    ("goal", "i8"),  # messages that must be complete before it is
    ("goals", "i8", MAX_LANES),  # slots
    ("owners", "i8"),  # address of a word for each slot: see below
    ("sources", "i8"),  # producer: address of a word for each slot: where its data is
    ("flights", "i8"),  # producer: address of a word for each slot: how many WRITEs to it are posted and have not ended
    ("shares", "i8"),  # address of LEDGER shares, message number n at n % LEDGER
    ("slots", "i8"),  # address of the slots here
    ("apart", "i8"),  # whether they are in a GPU's memory, which only RDMA devices reach
    ("scratch", "i8"),  # address there of a word that means nothing, see `visibility`; 0: not needed
    ("registered", "i8"),  # whether RDMA devices may read and write the slots; lkey and rkey on each, 0: not on this one
    ("keys", "i8", MAX_DEVICES),
    ("given", "i8", MAX_DEVICES),
    ("apart_there", "i8"),  # of the slots there, as OPEN has said: the same, their address, 0: not registered; and rkeys
    ("slots_there", "i8"),
    ("keys_there", "i8", MAX_DEVICES),
    ("direct", DIRECT),
    ("array", "i8"),  # producer: of the message `direct.message`, as ARRAY has said: address, rkeys, its description
    ("array_keys", "i8", MAX_DEVICES),
    ("array_message", MESSAGE),
    ("withdrawn", "i8"),  # producer: number of the newest message whose array was withdrawn; whether to confirm that
    ("confirm", "i8"),
    ("looked", "i8"),  # consumer: the same of the newest one whose array was looked up; of the newest that was advertised
    ("advertised", "i8"),
    ("withdrawal", "i8"),  # consumer: of the latter: see below
    ("begun", "i8", MAX_LANES),  # consumer: 1 + number of the newest slot of which anything has arrived
    ("waits", "i8"),  # consumer: number of the newest message, from 1 on, whose sender waits for its credit
    ("frames", "i8"),  # producer: address of a FRAME for each slot
    ("message", "i8"),  # producer: number of the message that is being sent; consumer: of the next one to come
    ("starts", "i8", MAX_LANES),  # producer: each lane's slots before this message
    ("sent", "i8", MAX_LANES),  # producer: slots sent; consumer: slots that the producer knows to be consumed
    ("credited", "i8"),  # consumer: messages that the producer knows to be consumed
    ("again", "i8"),  # producer: slots to be sent again
    ("entries", "i8"),  # producer: number of a message without slots to be sent again; -1: none
])  # fmt: skip
"""This side's half of a ring, and how far it is equal to the other."""

# WIRE.stop
UNTOLD, TOLD, KNOWN, HEARD = 0, 1, 2, 3
# WIRE.withdrawal
NO, DUE, SENT, CONFIRMED = 0, 1, 2, 3
# words at WIRE.owners: the sender's rail that carries a slot, or the receiver's that receives it, as 1 + its index
NOBODY, AGAIN, ARRIVED = 0, -1, -2

OFFER = np.dtype([
    ("name", "i8"),
    ("there", "i8"),
    ("words", "i8", OPEN_WORDS),
])  # fmt: skip
"""An OPEN that has come: name of the ring, the other side's number of the wire, and the payload."""

FAILURES = 64
"""FAILED frames that Python has not looked at; what is too much is sent again."""

FAILURE = np.dtype([
    ("link", "i8"),
    ("pair", "i8"),  # of this side
    ("peer", "i8"),
    ("answer", "i8"),
])  # fmt: skip
"""A FAILED that has come."""

TELL_WORDS = HEAD_WORDS + RECORD_BYTES // 8
"""Words of the payload of a TELL with a part of an answer; without there are HEAD_WORDS."""
ANSWERS = MOST_PARTS
"""Maximum number of answers to one question."""
KEPT_ANSWERS = 8 * ANSWERS
"""Answers that Python has not looked at: several processes are asked at once. What is too much is lost."""

ANSWER = np.dtype([
    ("number", "i8"),
    ("following", "i8"),
    ("words", "i8"),
    ("payload", "i8", TELL_WORDS),
])  # fmt: skip
"""A TELL that has come."""

REGIONS = 1024
"""Most arrays that are registered at a time."""

REGION = np.dtype([
    ("address", "i8"),  # 0: not in use
    ("bytes", "i8"),
    ("iova", "i8"),  # by which devices find it
    ("closing", "i8"),  # whether no new slot may use it
    ("keys", "i8", MAX_DEVICES),  # lkey and rkey on each device, 0: not on this one
    ("given", "i8", MAX_DEVICES),
])  # fmt: skip
"""An array that RDMA devices may read and write."""

AWAKE, RESTS, CALLED = 0, 1, 2
"""States of a further thread: it looks for work; it sleeps until `wake` is raised; that was done, and it does not run yet."""

HELPER = np.dtype([
    ("resting", "i8"),  # one of these
    ("wake", "i8"),  # eventfd
    ("polled", POLLED),
    ("pause", "i8", 2),  # struct timespec
    ("word", "i8"),
])  # fmt: skip
"""What a further thread of the carrier needs to sleep."""

CARRIER = np.dtype([
    ("movers", MOVERS),  # first, as movers expect
    ("lock", "i8"),
    ("drivers", "i8"),  # threads that wait for a message and call `progress` meanwhile
    ("calls", "i8"),  # how often they did
    ("rounds", "i8"),  # rail with which the next round of looks begins, modulo the number of rails
    ("last", "i8"),  # of many rails: which has moved a little last; -1: that was much
    ("asleep", "i8"),
    ("over", "i8"),
    ("helpers", "i8"),  # address of the records of the further threads, and how many there are
    ("helper_count", "i8"),
    ("wake", "i8"),  # eventfd that ends the carrier's sleep
    ("news", "i8"),  # eventfd by which compiled code tells Python of changes
    ("spins", "i8"),
    ("links", "i8"),  # addresses of tables of addresses
    ("rails", "i8"),
    ("wires", "i8"),
    ("link_count", "i8"),
    ("rail_count", "i8"),
    ("wire_count", "i8"),
    ("answers", "i8"),  # address of ANSWERS answers, and how many there are
    ("answer_count", "i8"),
    ("failures", "i8"),  # address of FAILURES failures, and how many there are
    ("failure_count", "i8"),
    ("regions", "i8"),  # address of REGIONS regions, and how many were in use at a time
    ("region_count", "i8"),
    ("recorder", "i8"),  # `Recorder.handle` of this process, or 0
    ("sink", "i8"),  # where bytes go that are not wanted
    ("poll", "i8"),  # address of struct pollfd[1 + number of rails]
    ("has_news", "i8"),  # whether Python should look at links and wires
    ("one", "i8"),  # the word 1, and a scratch word, for eventfds
    ("word", "i8"),
    ("pause", "i8", 2),  # struct timespec
])  # fmt: skip
"""What a process has once: the tables of the others, and the state of its threads."""

frame_at, tls_at, flight_at, rdma_at, share_at = map(compiled_at, (FRAME, TLS, FLIGHT, RDMA, SHARE))
rail_at, link_at, wire_at = map(compiled_at, (RAIL, LINK, WIRE))
offer_at, answer_at, failure_at = map(compiled_at, (OFFER, ANSWER, FAILURE))
region_at, helper_at, carrier_at = map(compiled_at, (REGION, HELPER, CARRIER))
Tls, Rdma, Rail, Link, Wire, Carrier = map(python_type, (TLS, RDMA, RAIL, LINK, WIRE, CARRIER))
SINK_BYTES = 1 << 16
