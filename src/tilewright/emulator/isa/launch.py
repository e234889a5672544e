"""Work stealing between clusters: clusterlaunchcontrol of sm_100a (PTX ISA 9.7.13.16)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.emulator.isa import Effect, instruction
from tilewright.emulator.isa.memory import shared_addresses
from tilewright.emulator.isa.tma import destinations, issues
from tilewright.emulator.isa.types import TYPES
from tilewright.emulator.parse import Instruction
from tilewright.emulator.registers import Lanes

_RESPONSE_BYTES = 16  # opaque in PTX; here x, y, z of the first CTA and whether there is one


@instruction(
    "clusterlaunchcontrol.try_cancel.async{.shared::cta}.mbarrier::complete_tx::bytes"
    "{.multicast::cluster::all}.b128",
    effects=True,
)
def try_cancel(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.16.1 try_cancel: takes over a cluster that has not started; the answer is a copy."""
    addresses, signals = (shared_addresses(lanes, o) for o in ins.operands)
    cta, place = lanes.cta, lanes.place
    machine, cluster, races = cta.machine, cta.cluster, cta.machine.races
    everyone = (1 << len(cluster.ctas)) - 1 if "multicast::cluster::all" in ins.parts else None

    def issue(warp: int, address: int, signal: int) -> None:
        agent: Any = races.issue(cta, warp, "try_cancel") if races else None

        def run() -> None:
            position = machine.cancel_next()
            response = np.array([*(position or (0, 0, 0)), position is not None], np.uint32)
            pairs = zip(
                destinations(address, everyone), destinations(signal, everyone), strict=True
            )
            for target, barrier_address in pairs:
                cluster.shared.check_range(target, _RESPONSE_BYTES)
                if races:
                    units = np.array([target])
                    races.units_access(agent, units, _RESPONSE_BYTES, True, place)
                window = slice(target, target + _RESPONSE_BYTES)
                cluster.shared.data[window] = response.view(np.uint8)
                cluster.shared.written[window] = 1
                barrier = cluster.mbarriers.at(barrier_address)
                if races:
                    races.async_arrive(barrier, agent, place)
                barrier.complete(_RESPONSE_BYTES)

        machine.queue.submit(object(), run, place)

    def effect() -> None:
        for warp, (address, signal) in issues(lanes, addresses(), signals()):
            issue(warp, address, signal)

    return effect


def _response(lanes: Lanes, ins: Instruction) -> np.ndarray:
    """The responses as [lane, word]."""
    return lanes.read(ins.operands[1], TYPES["b128"]).view(np.uint32).reshape(-1, 4)


@instruction("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", unit="alu")
def is_canceled(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.16.2 query_cancel.is_canceled: whether a cluster was taken over."""
    words, p = _response(lanes, ins), lanes.write(ins.operands[0], np.bool_)
    return lambda: np.not_equal(words[:, 3], 0, p)


@instruction("clusterlaunchcontrol.query_cancel.get_first_ctaid<::x|::y|::z>.b32.b128", unit="alu")
def first_ctaid(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.16.2 query_cancel.get_first_ctaid: a coordinate of its first CTA."""
    words, d = _response(lanes, ins), lanes.write(ins.operands[0], np.uint32)
    column = "xyz".index(ins.parts[2][-1])
    return lambda: np.copyto(d, words[:, column])


@instruction("clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128", unit="alu")
def first_ctaid_vector(ins: Instruction, lanes: Lanes) -> Effect:
    """9.7.13.16.2 query_cancel.get_first_ctaid.v4: all three; the fourth is unspecified."""
    words = _response(lanes, ins)
    targets = [lanes.write(o, np.uint32) for o in lanes.vector(ins.operands[0])]

    def effect() -> None:
        for column, d in enumerate(targets):
            d[:] = words[:, column]

    return effect
