"""One step of a warpgroup: what it does with one block of queries, and with the one before.

By the names that a spec's `order` lists, for the block number n of a tile:

    lse    the log-sum-exp of its queries, to registers
    S      S_n = K Q_n^T
    P      P_n = exp2(S_n - lse)
    dP     dP_n = V dO_n^T
    delta  the D of its queries, to registers; once dP is there, if it has been issued
    dV     dV += P_n dO_n
    dS     dS_n = P_n (dP_n - delta)
    write  dS_n to shared memory, where all warpgroups read it
    dK     dK += dS_{n-1} Q_{n-1}
    dQ     dQ_{n-1} = dS_{n-1} K
    add    the dQ that was made last is added to memory

dK and dQ run a step late: so none waits for what another warpgroup has yet to write, and there is
something to multiply under the exponentials. Multiplies complete in the order of their issue; where
an operation uses what one has made, or overwrites what it reads, it is waited for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, Int64

from tilewright.kernels.sm90 import matmul
from tilewright.kernels.sm90.fa3_backward.operands import Tile
from tilewright.kernels.sm90.fa3_backward.registers import (
    FRAGMENT_BYTES,
    OCTET_BYTES,
    WHOLE,
    Piece,
)
from tilewright.kernels.sm90.fa3_backward.scores import (
    Warpgroup,
    cap,
    hide,
    is_cut,
    make_capped_P,
    make_dS,
    make_P,
)
from tilewright.kernels.sm90.fa3_backward.turns import end_turn


class Place(NamedTuple):
    """Where a step stands. Steps are counted over the whole life of the kernel."""

    n: Int32
    first: Int32  # step of the tile
    block: Int32  # of queries
    has_next: Boolean  # whether the tile has one more


class Multiplies:
    """Those under way, in the order of their issue."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def issued(self, name: str) -> None:
        self.names.append(name)

    def wait_for(self, name: str) -> None:
        """And for those before it; if it is under way."""
        if name in self.names:
            self.names = self.names[self.names.index(name) + 1 :]
            matmul.wait(len(self.names))


class Step:
    """Runs while the kernel is traced. `before` are the head and the block of queries of the step
    before, and of the one before that; None in a tile's first step. V is that of tile `loaded`,
    which the first step waits for and the last lets go, if it is read from shared memory."""

    def __init__(self, wg: Warpgroup, tile: Tile, place: Place, before: Any, loaded: Int32):
        self.wg, self.tile, self.place, self.before = wg, tile, place, before
        self.loaded = loaded
        self.under_way = Multiplies()
        self.acc_S: Any = None
        self.acc_dP: Any = None
        self.lse: Any = None
        self.delta: Any = None
        self.has_dO = False
        self.is_next_there: Any = None
        self.is_dO_there: Any = None
        self.read_by_dK = False  # Q of the step before, as far as multiplies are issued
        self.holds_Q = before is not None  # that Q
        self.holds_V = not wg.spec.keys_in_registers

    def run(self) -> None:
        order = list(self.wg.spec.order)
        if self.before is None and order.index("dP") > order.index("P"):
            # With no dK and dQ to make, dP is what there is to multiply under the exponentials.
            order.remove("dP")
            order.insert(order.index("S") + 1, "dP")
        for name in order:
            getattr(self, f"_{name}")()
        # No multiply may be under way where the loop closes, if its result is read behind: the
        # assembler would then let none run beside another.
        self.under_way.wait_for("dV")
        self.wg.ch.do.release(self.place.n)
        matmul.wait(0)
        if self.wg.spec.hands_back_ds and self.before is not None:
            self.wg.ch.ds.release(self.place.n - 1)

    def _lse(self) -> None:
        if not self.wg.spec.has_softcap:
            self.lse = self.wg.regs.numbers(self.wg.sm.sLSE, self.wg.ch.q.index(self.place.n))

    def _S(self) -> None:
        ch, n = self.wg.ch, self.place.n
        self.acc_S = self.wg.regs.multiply_S(ch.q.index(n))
        self.under_way.issued("S")
        # Looked at here, known when it is wanted: a look takes as long as the queue is full.
        self.is_next_there = ch.q.is_full(n + 1)
        self.is_dO_there = ch.do.is_full(n)

    def _P(self) -> None:
        wg, place = self.wg, self.place
        self.under_way.wait_for("S")
        if wg.spec.has_softcap:
            cap(wg, matmul.as_rows(self.acc_S), self.tile, place.block)
        else:
            make_P(wg, self.acc_S, self.lse, self.tile, place.block)
        # The next Q is waited for here because of the branch: without one, the assembler moves the
        # wait for the next multiply up to before the exponentials.
        wait_for_next(self.is_next_there, place.has_next, wg, place.n + 1)

    def _delta(self) -> None:
        self._wait_for_dO()
        self.under_way.wait_for("dP")
        self._release_Q()
        self._release_V()
        self.delta = self.wg.regs.numbers(self.wg.sm.sDelta, self.wg.ch.do.index(self.place.n))

    def _dP(self) -> None:
        self._wait_for_dO()
        if self.before is None and self.holds_V:
            self.wg.ch.v.wait_full(self.loaded)
        self.acc_dP = self.wg.regs.multiply_dP(self.wg.ch.do.index(self.place.n))
        self.under_way.issued("dP")

    def _dV(self) -> None:
        self.wg.regs.multiply_dV(self.wg.ch.do.index(self.place.n))
        self.under_way.issued("dV")

    def _dS(self) -> None:
        wg, n = self.wg, self.place.n
        self.under_way.wait_for("dP")
        self._release_Q()
        self._release_V()
        if wg.spec.has_softcap:
            make_capped_P(wg, self.acc_S, wg.regs.numbers(wg.sm.sLSE, wg.ch.q.index(n)))
        dP = matmul.as_rows(self.acc_dP)
        make_dS(matmul.as_rows(self.acc_S), dP, self.delta)
        hide_dS(wg, dP, self.tile, self.place.block)

    def _write(self) -> None:
        wg, n = self.wg, self.place.n
        self.under_way.wait_for("dK")
        self._release_Q()
        wg.regs.rdS.store(self.acc_dP.load().to(wg.regs.rdS.element_type))
        if wg.spec.hands_back_ds:
            wg.ch.ds.wait_empty(n)
        wg.regs.write_dS(wg.ch.ds.index(n))
        # Orders dS's writes before the multiplies that read them.
        cute.arch.fence_proxy("async.shared", space="cta")
        wg.ch.ds.publish(n)

    def _dK(self) -> None:
        if self.before is not None:
            self.wg.regs.multiply_dK(self.wg.ch.q.index(self.place.n - 1))
            self.under_way.issued("dK")
            self.read_by_dK = True

    def _dQ(self) -> None:
        if self.before is not None:
            multiply_dQ(self.wg, self.place.n - 1)
            self.under_way.issued("dQ")

    def _add(self) -> None:
        if self.before is None:
            return
        last, older = self.before
        if self.wg.spec.adds_late:
            add_older(self.wg, self.tile, (self.place.n - 2, *older), self.place.first)
        else:
            self.under_way.wait_for("dQ")
            add_dQ(self.wg, self.tile, (self.place.n - 1, *last))

    def _wait_for_dO(self) -> None:
        """And its delta, once."""
        if not self.has_dO:
            wait_unless(self.is_dO_there, self.wg.ch.do, self.place.n)
            self.has_dO = True

    def _release_V(self) -> None:
        """Let V go in a tile's last step, if dP is done."""
        is_read = self.acc_dP is not None and "dP" not in self.under_way.names
        if self.holds_V and is_read:
            release_last(self.wg.ch.v, self.loaded, self.place.has_next)
            self.holds_V = False

    def _release_Q(self) -> None:
        """Let the Q of the step before go, if dK, the last to read it, is done."""
        if self.holds_Q and self.read_by_dK and "dK" not in self.under_way.names:
            self.wg.ch.q.release(self.place.n - 1)
            self.holds_Q = False


@cute.jit
def wait_for_next(is_there: Boolean, has_next: Boolean, wg: Constexpr, n: Int32):
    if has_next & (not is_there):
        wg.ch.q.wait_full(n)


@cute.jit
def release_last(ring: Constexpr, n: Int32, has_next: Boolean):
    if not has_next:
        ring.release(n)


@cute.jit
def wait_unless(is_there: Boolean, ring: Constexpr, n: Int32):
    if not is_there:
        ring.wait_full(n)


@cute.jit
def hide_dS(wg: Constexpr, dS: cute.Tensor, tile: Tile, block: Int32):
    """What a hidden pair is multiplied by may be NaN."""
    if is_cut(wg, tile, block):
        hide(wg, dS, tile, block, 0.0)


def multiply_dQ(wg: Warpgroup, n: Int32) -> None:
    """Of step `n`, when all warpgroups have written its dS."""
    wg.ch.ds.wait_full(n)
    wg.regs.multiply_dQ(wg.ch.ds.index(n))


def add_dQ(wg: Warpgroup, tile: Tile, step: Any, piece: Piece = WHOLE) -> None:
    """This warpgroup's part of dQ of step (n, head, block), registers -> gmem; in turn, if any.

    The address is made here: one that steps carry could not change before the additions of the one
    before had left their queue.
    """
    spec, op, (n, head, block) = wg.spec, wg.op, step
    outer = (head,) if spec.packed else (head, tile.batch)
    unit = block * spec.tile_q // matmul.ROWS
    if spec.packed:
        unit = wg.regs.first_unit + block * (spec.tile_q // matmul.ROWS)
    if spec.tile_q != matmul.ROWS:
        unit += wg.regs.w
    # What all threads share is kept apart, for the sake of the uniform datapath.
    sums = (op.mdQ.iterator + op.mdQ.layout((0, 0, 0, unit, *outer))).toint()
    sums += Int64(wg.regs.thread * FRAGMENT_BYTES + wg.regs.first_octet * OCTET_BYTES)
    if spec.deterministic and piece.is_first:
        wg.ch.turn.wait_full(n)
    wg.regs.add_dQ(sums, piece)
    if spec.deterministic and piece.is_last:
        end_turn(wg, n)


@cute.jit
def add_older(wg: Constexpr, tile: Tile, step: Any, first: Int32, piece: Constexpr = WHOLE):
    """The same, unless the tile's second step has none to add yet."""
    if step[0] >= first:
        add_dQ(wg, tile, step, piece)
