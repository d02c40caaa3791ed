"""The published pseudo-code of the closure split, transcribed word for word: the reference for `closure`."""

from __future__ import annotations


def fetch_inputs(unit):
    return [*unit.input_params, *unit.input_params_posi.values(), *unit.input_params_nega.values()]


def build_edges(units):
    last_producer = {}
    edges = []
    for id, unit in enumerate(units):
        for param in fetch_inputs(unit):
            if param in last_producer:
                edges.append((last_producer[param], id))
        for param in unit.output_params:
            last_producer[param] = id
    return edges


def build_chains(units):
    params = sorted({param for unit in units for param in [*fetch_inputs(unit), *unit.output_params]})
    chains = {param: [] for param in params}
    for id, unit in enumerate(units):
        for param in unit.output_params:
            chains[param].append(id)
    return chains


def forward_reachable(edges, related):
    while True:
        neighbors = {target for source, target in edges if source in related and target not in related}
        if not neighbors:
            break
        related |= neighbors
    return related


def updating_units(units, chains, related):
    first_consumer = {}
    for unit_id in sorted(related):
        for param in fetch_inputs(units[unit_id]):
            if param not in first_consumer:
                first_consumer[param] = unit_id
    for param, first in first_consumer.items():
        chain = chains[param]
        if first in chain and chain.index(first) != len(chain) - 1:
            for later in chain[chain.index(first) + 1 :]:
                related.add(later)
    return related


def published_split(units, start):
    """`start` is the published step 1: the directly related units."""
    related, edges, chains = set(start), build_edges(units), build_chains(units)
    while True:
        before = len(related)
        related = forward_reachable(edges, related)
        related = updating_units(units, chains, related)
        if len(related) == before:
            return related
