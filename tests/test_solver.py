"""The solver: names first, then order inside parents, then the only fit; never a guess."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.errors import UsageError
from ckpttool.mapping.layer_names import word
from ckpttool.mapping.scopes import Candidate
from ckpttool.mapping.solver import Solution, solve


def layers(*said: str) -> list[Candidate]:
    """Return candidates from `name:signature`; several signatures are divided by |."""
    found = []
    for one in said:
        name, _, signatures = one.partition(":")
        steps = tuple(name.split("/")) if name else ()
        found.append(Candidate(steps, frozenset((s,) for s in (signatures or "square").split("|"))))
    return found


def pairs(sources: list[Candidate], targets: list[Candidate], solution: Solution) -> dict[str, str]:
    return {targets[p.target].title: f"{sources[p.source].title} by {p.by}" for p in solution.pairs}


def solved(sources: list[Candidate], targets: list[Candidate], **how: object) -> dict[str, str]:
    return pairs(sources, targets, solve(sources, targets, **how))  # type: ignore[arg-type]


def test_names_decide_where_order_would_mislead() -> None:
    found = solved(layers("b", "a", "c"), layers("a", "b", "c"))
    assert found == {"a": "a by name", "b": "b by name", "c": "c by name"}


def test_twin_critics_keep_to_their_names() -> None:
    found = solved(layers("q2/l1", "q2/l2", "q1/l1", "q1/l2"), layers("q1/0", "q1/2", "q2/0", "q2/2"))
    assert found["q1/0"] == "q1/l1 by order"
    assert found["q2/2"] == "q2/l2 by order"


def test_flat_twins_go_in_order() -> None:
    found = solved(layers("l1", "l2", "l3", "l4"), layers("q1/0", "q1/2", "q2/0", "q2/2"))
    assert list(found.values()) == [f"l{n} by order" for n in (1, 2, 3, 4)]


def test_an_online_and_a_target_network_are_not_chosen_between() -> None:
    sources = layers("actor/l1", "actor/l2", "actor_target/l1", "actor_target/l2")
    targets = layers("policy/0", "policy/2")
    solution = solve(sources, targets)
    assert solution.pairs == ()
    (group,) = solution.ambiguous
    assert [sources[n].title for n in group.sources] == [s.title for s in sources]
    said = solved(sources, targets, given=[("actor", "policy")])
    assert said == {"policy/0": "actor/l1 by given", "policy/2": "actor/l2 by given"}


def test_one_square_layer_too_many_is_ambiguous() -> None:
    solution = solve(layers("a", "b", "c"), layers("x", "y"))
    assert not solution.pairs
    assert solution.ambiguous[0].sources == (0, 1, 2)


def test_numbers_that_keras_counts_by_say_an_order_only() -> None:
    found = solved(layers("dense_7", "dense_8"), layers("dense_8", "dense_9"))
    assert found == {"dense_8": "dense_7 by order", "dense_9": "dense_8 by order"}


def test_items_of_lists_are_counted_not_compared() -> None:
    found = solved(layers("net/0", "net/2", "net/10"), layers("net/2", "net/4", "net/6"))
    assert list(found.values()) == ["net/0 by order", "net/2 by order", "net/10 by order"]


def test_names_in_alphabetical_order_say_no_order() -> None:
    sources, targets = layers("body/0", "head/0", "head/2"), layers("0", "2", "4")
    assert len(solve(sources, targets).pairs) == 3
    assert solve(sources, targets, in_order=False).pairs == ()


def test_numbers_order_what_a_file_sorted() -> None:
    sources = layers("fc1", "fc10", "fc2", "out:last")
    found = solved(sources, layers("0", "2", "4", "6:last"), in_order=False)
    assert list(found.values()) == ["fc1 by order", "fc2 by order", "fc10 by order", "out by order"]


def test_what_fits_once_is_matched_last() -> None:
    found = solved(layers("a:wide", "b:square", "extra:other"), layers("x:square", "y:wide"))
    assert found == {"x": "b by only fit", "y": "a by only fit"}


def test_a_matrix_of_two_kinds_goes_where_nothing_else_fits() -> None:
    sources = layers("words:embedding|dense", "out:dense", "more:none")
    assert solved(sources, layers("e:embedding", "d:dense")) == {
        "e": "words by only fit",
        "d": "out by only fit",
    }


def test_a_name_that_does_not_fit_is_told() -> None:
    sources, targets = layers("fc:wide", "x"), layers("fc:narrow", "y")
    (misfit,) = solve(sources, targets).misfits
    assert (sources[misfit.source].title, targets[misfit.target].title) == ("fc", "fc")


def test_wrappers_around_everything_do_not_count() -> None:
    found = solved(layers("model/_functional/a", "model/_functional/b"), layers("net/core/a", "net/core/b"))
    assert found == {"net/core/a": "model/_functional/a by name", "net/core/b": "model/_functional/b by name"}


def test_a_pair_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="--match"):
        solve(layers("a"), layers("b"), given=[("c", "b")])


@pytest.mark.parametrize("step", ["dense", "dense_7", "layer_with_weights-3", "12", "conv2d_transpose_1"])
def test_words_that_only_count(step: str) -> None:
    assert word(step).text is None


@pytest.mark.parametrize(("one", "other"), [("fc_1", "fc1"), ("selfAttn", "self_attn"), ("_body", "body")])
def test_words_that_are_spelled_in_two_ways(one: str, other: str) -> None:
    assert word(one) == word(other)
    assert word(one).text is not None


NAMES = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.sampled_from("uvw")), unique=True, min_size=1
)


@given(NAMES, st.randoms())
@settings(max_examples=50, deadline=None)
def test_a_shuffled_copy_of_a_model_is_itself(names: list[tuple[str, ...]], order: object) -> None:
    sources = [Candidate(name, frozenset({("square",)})) for name in names]
    targets = list(sources)
    order.shuffle(targets)  # type: ignore[attr-defined]
    solution = solve(sources, targets)
    assert {(sources[p.source].name, targets[p.target].name) for p in solution.pairs} == {
        (n, n) for n in names
    }


@pytest.mark.parametrize("named", [True, False])
def test_ten_thousand_layers_take_no_square_of_that(named: bool) -> None:
    sources = layers(*(f"block{n // 10}/l{n % 10}:{n % 7}" for n in range(10_000)))
    step = "block" if named else "part"
    targets = layers(*(f"{step}{n // 10}/{'l' if named else 'k'}{n % 10}:{n % 7}" for n in range(10_000)))
    start = time.process_time()
    found = solved(sources, targets)
    assert len(found) == 10_000
    assert time.process_time() - start < 5


def test_ten_thousand_counted_layers_are_told_as_fast() -> None:
    sources = layers(*(f"sequential_{n // 2}/dense_{n}:{n % 2}" for n in range(10_000)))
    targets = layers(*(f"part{n // 2}/l{n}:{n % 2}" for n in range(10_000)))
    start = time.process_time()
    solution = solve(sources, targets)
    assert solution.by_order[-1] == ("sequential_4999", "part4999")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        (("dense:in", "dense_1", "dense_2"), ("body:in", "mean", "log_std")),
        (("body:in", "log_std", "mean"), ("0:in", "2", "4")),
        (("body:in", "log_std", "mean"), ("0:in", "mu", "log_sigma")),
    ],
)
def test_words_of_one_side_only_are_no_order(sources: tuple[str, ...], targets: tuple[str, ...]) -> None:
    # Which of two equal heads was made first is no reason.
    solution = solve(layers(*sources), layers(*targets))
    assert [(pair.source, pair.target) for pair in solution.pairs] == [(0, 0)]
    (group,) = solution.ambiguous
    assert group == ((1, 2), (1, 2))


def test_whole_networks_that_words_of_one_side_tell_apart_are_ambiguous() -> None:
    sources = layers("sequential/dense", "sequential/dense_1", "sequential_1/dense_2", "sequential_1/dense_3")
    targets = layers("actor/0", "actor/2", "critic/0", "critic/2")
    solution = solve(sources, targets)
    assert not solution.pairs
    assert len(solution.ambiguous) == 1
    found = solved(sources, targets, given=[("sequential", "critic")])
    assert found["critic/2"] == "sequential/dense_1 by given"
    assert found["actor/0"] == "sequential_1/dense_2 by order"


def test_networks_that_only_numbers_tell_apart_go_in_order() -> None:
    found = solved(layers("sequential/dense", "sequential_1/dense_1"), layers("q1/0", "q2/0"))
    assert found == {"q1/0": "sequential/dense by order", "q2/0": "sequential_1/dense_1 by order"}


def test_words_of_both_sides_do_not_stop_the_order() -> None:
    ways = ("forward_layer", "backward_layer")
    sources = layers(*(f"bidirectional{n}/{way}" for n in ("", "_1") for way in ways))
    targets = layers(*(f"rnn/{n}/{way}" for n in (0, 1) for way in ways))
    assert len(solved(sources, targets)) == 4


# Two critics as a `.weights.h5` of Keras keeps them: counted through the program, sorted by their names.
COUNTED = (
    *("sequential/dense", "sequential/dense_1", "sequential/dense_2:last"),
    *("sequential_1/dense_3", "sequential_1/dense_4", "sequential_1/dense_5:last"),
)


def critics(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}/{step}" for name in names for step in ("0", "2", "4:last"))


@pytest.mark.parametrize("in_order", [True, False])
def test_counted_networks_stay_whole(in_order: bool) -> None:
    sources, targets = layers(*COUNTED), layers(*critics("q1", "q2"))
    solution = solve(sources, targets, in_order=in_order)
    assert [pair.source for pair in solution.pairs] == list(range(6))
    assert solution.by_order == (("sequential", "q1"), ("sequential_1", "q2"))


@pytest.mark.parametrize("in_order", [True, False])
def test_numbers_that_contradict_the_order_leave_the_networks_open(in_order: bool) -> None:
    # Defined as q2, q1: the first network of the source is either.
    sources, targets = layers(*COUNTED), layers(*critics("q2", "q1"))
    solution = solve(sources, targets, in_order=in_order)
    assert solution.pairs == ()
    assert solution.by_order == ()
    assert {len(group.targets) for group in solution.ambiguous} == {2, 4}
    said = solved(sources, targets, in_order=in_order, given=[("sequential", "q1")])
    assert (said["q1/4"], said["q2/4"]) == ("sequential/dense_2 by given", "sequential_1/dense_5 by order")


def test_numbers_of_both_sides_that_agree_are_no_assumption() -> None:
    solution = solve(layers(*critics("critic1", "critic2")), layers(*critics("q1", "q2")))
    assert len(solution.pairs) == 6
    assert solution.by_order == ()
    assert solve(layers(*critics("critic1", "critic2")), layers(*critics("q2", "q1"))).pairs == ()


def test_a_list_of_networks_and_counted_ones_are_paired_by_order() -> None:
    solution = solve(layers(*COUNTED), layers(*critics("qs/0", "qs/1")))
    assert solution.by_order == (("sequential", "qs/0"), ("sequential_1", "qs/1"))
    # Layers in a row are what a list is for.
    assert solve(layers("dense", "dense_1"), layers("net/0", "net/2")).by_order == ()
    assert solve(layers("net/0", "net/2"), layers("body/0", "body/1")).by_order == ()


def test_what_is_paired_by_order_is_told_by_layer_where_it_is_no_module() -> None:
    solution = solve(layers("l1", "l2", "l3", "l4"), layers("q1/0", "q1/2", "q2/0", "q2/2"))
    assert solution.by_order == (("l1", "q1/0"), ("l2", "q1/2"), ("l3", "q2/0"), ("l4", "q2/2"))
    assert solve(layers("dense", "dense_1"), layers("q1", "q2")).by_order == (
        ("dense", "q1"),
        ("dense_1", "q2"),
    )
    assert solve(layers("q1", "q2"), layers("dense", "dense_1")).by_order == (
        ("q1", "dense"),
        ("q2", "dense_1"),
    )
    assert solve(layers("q2", "q1"), layers("dense", "dense_1")).pairs == ()
