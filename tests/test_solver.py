"""The solver: names first, then the only fit, words, modules and numbers; order only where it is accepted."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core import UsageError
from ckpttool.core.activations import CallPlace
from ckpttool.mapping import LayerCandidate, Solution, parse_name_step, solve


def layers(*texts: str) -> list[LayerCandidate]:
    """Return candidates from `name:signature`; several signatures are divided by |."""
    layers = []
    for one in texts:
        name, _, signatures = one.partition(":")
        steps = tuple(name.split("/")) if name else ()
        layers.append(LayerCandidate(steps, frozenset((s,) for s in (signatures or "square").split("|"))))
    return layers


def pairs(
    sources: list[LayerCandidate], targets: list[LayerCandidate], solution: Solution
) -> dict[str, tuple[str, str]]:
    return {targets[p.target].title: (sources[p.source].title, p.by) for p in solution.pairs}


def solved(
    sources: list[LayerCandidate], targets: list[LayerCandidate], **how: object
) -> dict[str, tuple[str, str]]:
    return pairs(sources, targets, solve(sources, targets, **how))  # type: ignore[arg-type]


def test_names_decide_where_order_would_mislead() -> None:
    pairs = solved(layers("b", "a", "c"), layers("a", "b", "c"))
    assert pairs == {"a": ("a", "name"), "b": ("b", "name"), "c": ("c", "name")}


def test_twin_critics_keep_to_their_names() -> None:
    pairs = solved(layers("q2/l1", "q2/l2", "q1/l1", "q1/l2"), layers("q1/0", "q1/2", "q2/0", "q2/2"))
    assert pairs["q1/0"] == ("q1/l1", "numbers")
    assert pairs["q2/2"] == ("q2/l2", "numbers")


def test_flat_layers_are_no_twins_unless_the_order_is_accepted() -> None:
    sources, targets = layers("l1", "l2", "l3", "l4"), layers("q1/0", "q1/2", "q2/0", "q2/2")
    (group,) = solve(sources, targets).ambiguous
    assert group.ordered is None
    pairs = solved(sources, targets, accept_order=True)
    assert list(pairs.values()) == [(f"l{n}", "order") for n in (1, 2, 3, 4)]


def test_an_online_and_a_target_network_are_not_chosen_between() -> None:
    sources = layers("actor/l1", "actor/l2", "actor_target/l1", "actor_target/l2")
    targets = layers("policy/0", "policy/2")
    solution = solve(sources, targets)
    assert solution.pairs == ()
    (group,) = solution.ambiguous
    assert [sources[n].title for n in group.sources] == [s.title for s in sources]
    pairs = solved(sources, targets, pairs=[("actor", "policy")])
    assert pairs == {"policy/0": ("actor/l1", "given"), "policy/2": ("actor/l2", "given")}


def test_one_square_layer_too_many_is_ambiguous() -> None:
    solution = solve(layers("a", "b", "c"), layers("x", "y"))
    assert not solution.pairs
    assert solution.ambiguous[0].sources == (0, 1, 2)


def test_numbers_that_keras_counts_by_say_an_order_only() -> None:
    pairs = solved(layers("dense_7", "dense_8"), layers("dense_8", "dense_9"))
    assert pairs == {"dense_8": ("dense_7", "numbers"), "dense_9": ("dense_8", "numbers")}


def test_items_of_lists_are_counted_not_compared() -> None:
    pairs = solved(layers("net/0", "net/2", "net/10"), layers("net/2", "net/4", "net/6"))
    assert list(pairs.values()) == [("net/0", "numbers"), ("net/2", "numbers"), ("net/10", "numbers")]


def test_names_in_alphabetical_order_say_no_order() -> None:
    sources, targets = layers("body/0", "head/0", "head/2"), layers("0", "2", "4")
    assert len(solve(sources, targets, accept_order=True).pairs) == 3
    assert solve(sources, targets, in_order=False, accept_order=True).pairs == ()


def test_numbers_order_what_a_file_sorted() -> None:
    sources = layers("fc1", "fc10", "fc2", "out:last")
    pairs = solved(sources, layers("0", "2", "4", "6:last"), in_order=False)
    assert list(pairs.values()) == [
        ("fc1", "numbers"),
        ("fc2", "numbers"),
        ("fc10", "numbers"),
        ("out", "only fit"),
    ]


def test_what_fits_once_is_matched_last() -> None:
    pairs = solved(layers("a:wide", "b:square", "extra:other"), layers("x:square", "y:wide"))
    assert pairs == {"x": ("b", "only fit"), "y": ("a", "only fit")}


def test_a_matrix_of_two_kinds_goes_where_nothing_else_fits() -> None:
    sources = layers("words:embedding|dense", "out:dense", "more:none")
    assert solved(sources, layers("e:embedding", "d:dense")) == {
        "e": ("words", "only fit"),
        "d": ("out", "only fit"),
    }


def test_a_name_that_does_not_fit_is_told() -> None:
    sources, targets = layers("fc:wide", "x"), layers("fc:narrow", "y")
    (misfit,) = solve(sources, targets).misfits
    assert (sources[misfit.source].title, targets[misfit.target].title) == ("fc", "fc")


def test_wrappers_around_everything_do_not_count() -> None:
    pairs = solved(layers("model/_functional/a", "model/_functional/b"), layers("net/core/a", "net/core/b"))
    assert pairs == {
        "net/core/a": ("model/_functional/a", "name"),
        "net/core/b": ("model/_functional/b", "name"),
    }


def test_a_pair_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="--match"):
        solve(layers("a"), layers("b"), pairs=[("c", "b")])


@pytest.mark.parametrize("step", ["dense", "dense_7", "layer_with_weights-3", "12", "conv2d_transpose_1"])
def test_words_that_only_count(step: str) -> None:
    assert parse_name_step(step).text is None


@pytest.mark.parametrize(("one", "other"), [("fc_1", "fc1"), ("selfAttn", "self_attn"), ("_body", "body")])
def test_words_that_are_spelled_in_two_ways(one: str, other: str) -> None:
    assert parse_name_step(one) == parse_name_step(other)
    assert parse_name_step(one).text is not None


NAMES = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.sampled_from("uvw")), unique=True, min_size=1
)


@given(NAMES, st.randoms())
@settings(deadline=None)
def test_a_shuffled_copy_of_a_model_is_itself(names: list[tuple[str, ...]], order: object) -> None:
    sources = [LayerCandidate(name, frozenset({("square",)})) for name in names]
    targets = list(sources)
    order.shuffle(targets)  # type: ignore[attr-defined]
    solution = solve(sources, targets)
    assert {(sources[p.source].name, targets[p.target].name) for p in solution.pairs} == {
        (n, n) for n in names
    }


@pytest.mark.long
@pytest.mark.parametrize("named", [True, False])
def test_ten_thousand_layers_take_no_square_of_that(named: bool) -> None:
    sources = layers(*(f"block{n // 10}/l{n % 10}:{n % 7}" for n in range(10_000)))
    step = "block" if named else "part"
    targets = layers(*(f"{step}{n // 10}/{'l' if named else 'k'}{n % 10}:{n % 7}" for n in range(10_000)))
    start = time.process_time()
    pairs = solved(sources, targets)
    assert len(pairs) == 10_000
    assert time.process_time() - start < 5


@pytest.mark.long
def test_ten_thousand_layers_under_other_words_take_no_square_of_that() -> None:
    sources = layers(*(f"sequential_{n // 2}/dense_{n}:{n % 2}" for n in range(10_000)))
    targets = layers(*(f"part{n // 2}/l{n}:{n % 2}" for n in range(10_000)))
    start = time.process_time()
    assert len(solve(sources, targets, accept_order=True).pairs) == 10_000
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        (("dense:in", "dense_1", "dense_2"), ("body:in", "mean", "log_std")),
        (("body:in", "log_std", "mean"), ("0:in", "2", "4")),
        (("dense:in", "dense_1", "dense_2"), ("body/0:in", "body/2", "head")),
        (("dense:in", "dense_1", "dense_2"), ("body:in", "q1", "q2")),
    ],
)
def test_words_of_one_side_only_are_no_order(sources: tuple[str, ...], targets: tuple[str, ...]) -> None:
    # Which of two equal heads was made first is no reason.
    solution = solve(layers(*sources), layers(*targets))
    assert [(pair.source, pair.target) for pair in solution.pairs] == [(0, 0)]
    (group,) = solution.ambiguous
    assert group == ((1, 2), (1, 2), None, False)


def test_whole_networks_that_words_of_one_side_tell_apart_are_ambiguous() -> None:
    sources = listed("sequential/dense", "sequential/dense_1", "sequential_1/dense_2", "sequential_1/dense_3")
    targets = layers("actor/0", "actor/2", "critic/0", "critic/2")
    solution = solve(sources, targets)
    assert not solution.pairs
    assert len(solution.ambiguous) == 1
    pairs = solved(sources, targets, pairs=[("sequential", "critic")])
    assert pairs["critic/2"] == ("sequential/dense_1", "given")
    assert pairs["actor/0"] == ("sequential_1/dense_2", "numbers")


def test_networks_that_the_framework_counts_have_no_numbers_of_the_program() -> None:
    sources, targets = layers("sequential/dense", "sequential_1/dense_1"), layers("q1/0", "q2/0")
    assert solve(sources, targets).pairs == ()
    pairs = solved(sources, targets, accept_order=True)
    assert pairs == {"q1/0": ("sequential/dense", "order"), "q2/0": ("sequential_1/dense_1", "order")}


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
@pytest.mark.parametrize("names", [("q1", "q2"), ("q2", "q1"), ("qs/0", "qs/1")])
def test_counted_networks_stay_open(names: tuple[str, str], in_order: bool) -> None:
    sources, targets = listed(*COUNTED), layers(*critics(*names))
    solution = solve(sources, targets, in_order=in_order)
    assert solution.pairs == ()
    assert not any(group.ordered for group in solution.ambiguous)
    accepted = solve(sources, targets, in_order=in_order, accept_order=True)
    assert [pair.source for pair in accepted.pairs] == list(range(6))
    pairs = solved(sources, targets, in_order=in_order, pairs=[("sequential", names[0])])
    assert (pairs[f"{names[0]}/4"], pairs[f"{names[1]}/4"]) == (
        ("sequential/dense_2", "given"),
        ("sequential_1/dense_5", "only fit"),
    )


def test_numbers_of_both_sides_pair_whatever_the_order() -> None:
    for names in (("q1", "q2"), ("q2", "q1")):
        pairs = solved(layers(*critics("critic1", "critic2")), layers(*critics(*names)))
        assert pairs["q1/0"][0] == "critic1/0"
        assert pairs["q2/4"][0] == "critic2/4"


def test_a_row_that_the_framework_counts_is_an_assumption() -> None:
    solution = solve(listed("dense", "dense_1"), layers("net/0", "net/2"))
    assert len(solution.counted) == len(solution.pairs) == 2
    assert not solve(layers("net/0", "net/2"), layers("body/0", "body/1")).counted


def test_the_order_in_which_a_program_made_layers_is_not_that_of_its_calls() -> None:
    # Names of variables alone: Keras counted the layers of a class as the program made them.
    items, row = layers("dense", "dense_1", "dense_2"), layers("fc1", "fc2", "fc3")
    assert solve(items, row).pairs == solve(items, called(*row)).pairs == solve(row, items).pairs == ()
    assert [group.ordered for group in solve(items, called(*row)).ambiguous] == [None]
    assert list(solved(row, called(*items)).values()) == [
        ("fc1", "calls"),
        ("fc2", "calls"),
        ("fc3", "calls"),
    ]


def test_branches_that_differ_in_a_setting_are_not_paired_by_numbers() -> None:
    sources = layers("convs/0", "convs/1")
    targets = [
        one._replace(settings=frozenset({("dilation", rate)}))
        for rate, one in enumerate(called(*layers("rate1", "rate2"), chain=False), start=1)
    ]
    assert solve(sources, targets).pairs == ()
    assert len(solve(sources, called(*targets)).pairs) == 2


def test_an_order_is_offered_where_both_sides_have_the_same_kind_of_order() -> None:
    both = called(*layers("a", "b"), chain=False), called(*layers("x", "y"), chain=False)
    assert [group.ordered for group in solve(*both).ambiguous] == ["calls"]
    pairs = solved(both[0][::-1], both[1], accept_order=True)
    assert pairs == {"x": ("a", "order"), "y": ("b", "order")}
    assert [group.ordered for group in solve(layers("a", "b"), both[1]).ambiguous] == [None]


def test_what_a_model_lists_otherwise_than_it_was_made() -> None:
    # Keras: Dense(6)(Dense(6)(x)) makes the outer one first, and lists it last.
    sources = layers("hidden1", "hidden2")
    ranked = [one._replace(rank=rank) for rank, one in enumerate(listed("dense_1", "dense"))]
    assert solved(sources, ranked) == {}
    chain = called(*ranked)
    assert solved(sources, chain) == {"dense_1": ("hidden1", "calls"), "dense": ("hidden2", "calls")}
    assert solved(layers("net/0", "net/2"), ranked) == {
        "dense_1": ("net/0", "numbers"),
        "dense": ("net/2", "numbers"),
    }


def listed(*texts: str) -> list[LayerCandidate]:
    """Return layers whose counts follow a list of their model."""
    return [one._replace(listed=True) for one in layers(*texts)]


def called(*row: LayerCandidate, chain: bool = True) -> list[LayerCandidate]:
    """Return layers as a model calls them: one after the other, or all with the same input."""
    return [one._replace(call=CallPlace(n, (1 << n) - 1 if chain else 0)) for n, one in enumerate(row)]


@pytest.mark.parametrize("sources", ["dense dense_1 dense_2", "l/0 l/2 l/4", "fc1 fc2 fc3"])
def test_a_chain_of_calls_is_evidence_and_calls_beside_each_other_are_none(sources: str) -> None:
    having, wanting = listed(*sources.split()), layers("first", "hidden", "out")
    assert solve(having, wanting).pairs == ()
    pairs = solved(having, called(*wanting))
    assert list(pairs.values()) == [(name, "calls") for name in sources.split()]
    assert solve(having, called(*wanting, chain=False)).pairs == ()
    # Experts in a list stand beside each other.
    experts = called(*layers("experts/0", "experts/1", "experts/2"), chain=False)
    assert solve(layers("dense", "dense_1", "dense_2"), experts).pairs == ()
    named = solve(layers("sequential/dense", "sequential_1/dense_1"), called(*layers("a", "b")))
    assert named.pairs == ()


@pytest.mark.parametrize(
    ("sources", "targets", "expected"),
    [
        # Equal numbers in lists are names.
        ("h/0/k h/0/q h/1/k h/1/q", "h/0/q h/0/k h/1/q h/1/k", "h/0/q h/0/k h/1/q h/1/k"),
        ("net/0 net/2", "net/0 net/2 net/4", "net/0 net/2 -"),
        # One side's prefix.
        ("m/h/0/q m/h/0/k m/wte lm_head:w", "h/0/k h/0/q wte head:w", "m/h/0/k m/h/0/q m/wte lm_head"),
        ("conv1 conv2 fc", "backbone/conv2 backbone/conv1 fc", "conv2 conv1 fc"),
        ("one/conv1 one/conv2 fc", "two/conv2 two/conv1 fc", "one/conv2 one/conv1 fc"),
        ("actor/l1 actor_target/l1", "policy/l1", "-"),
        # Words at another depth, in other spellings.
        ("value_dense adv_dense", "advantage/0 value/0", "adv_dense value_dense"),
        ("query key value", "k_proj v_proj q_proj", "key value query"),
        ("mu log_std", "log_sigma/0 mean/0", "log_std mu"),
        ("fc_value fc_a", "heads/a heads/value", "fc_a fc_value"),
        # Words that exclude each other.
        ("value", "advantage", "-"),
        ("critic/l1", "actor/l1", "-"),
        ("encoder/0", "decoder/0", "-"),
        # Modules whose other layers are matched.
        ("s/d:a s/d_1 t/d_2:b t/d_3", "actor/0:b actor/2 critic/0:a critic/2", "t/d_2 t/d_3 s/d s/d_1"),
        # Order alone.
        ("a b", "x y", "- -"),
        ("dense dense_1 dense_2", "value/0 value/2 advantage/0", "- - -"),
        ("dense dense_1 dense_2", "out layers/0 layers/1", "- - -"),
        ("dense dense_1", "head body/0", "- -"),
        ("m/_operations/3 m/_operations/4", "fc_1 fc_2", "- -"),
        ("m/_operations/3 m/_operations/4", "net/0 net/2", "m/_operations/3 m/_operations/4"),
        ("dense dense_1 dense_2 dense_3", "q k v o", "- - - -"),
    ],
)  # fmt: skip
def test_what_is_evidence(sources: str, targets: str, expected: str) -> None:
    for turned in (False, True):
        having = layers(*sources.split())
        pairs = solved(having[::-1] if turned else having, layers(*targets.split()), in_order=not turned)
        names = [pairs.get(t.partition(":")[0], ("-",))[0] for t in targets.split()]
        assert names == expected.split()


# Lone tensors whose names state a function of a quantity: source, target, whether the values may be the same.
QUANTITIES = [
    ("variance", "std", False),
    ("obs_var", "obs_std", False),
    ("running_var", "variance", True),
    ("log_std", "std", False),
    ("log_std", "logstd", True),
    ("logvar", "log_std", False),
    ("log_alpha", "alpha", False),
    ("logits", "offset", True),
    ("scale_inv", "scale", False),
    ("precision", "scale", False),
    ("sqrt_beta", "beta_t", False),
    ("squared_sum", "total", False),
    ("gain", "gamma", True),
    ("variable", "log_std", True),
    ("0", "log_std", True),
]


@pytest.mark.parametrize(("source", "target", "same"), QUANTITIES)
def test_tensors_that_state_other_quantities_are_not_the_only_fit(
    source: str, target: str, same: bool
) -> None:
    def lone(name: str) -> list[LayerCandidate]:
        return [one._replace(lone=True) for one in layers(f"{name}:vector")]

    solution = solve(lone(source), lone(target))
    assert bool(solution.pairs) == same
    assert [group.differ for group in solution.ambiguous] == ([] if same else [True])
    (stated,) = solve(lone(source), lone(target), pairs=[(source, target)]).pairs
    assert stated.by == "given"
    assert solve(layers(f"{source}:vector"), layers(f"{target}:vector")).pairs  # layers: one head each


def test_what_a_module_has_in_excess_beside_its_siblings_fits_further_out() -> None:
    pairs = solved(layers("norm/mean:a", "norm/count:b", "out:c"), layers("mean:a", "fc:c"))
    assert pairs == {"mean": ("norm/mean", "name"), "fc": ("out", "only fit")}


def test_a_shared_layer_fills_several_where_the_user_pairs_them() -> None:
    sources, targets = layers("embed"), layers("a", "b")
    assert solved(sources, targets) == {}
    pairs = solved(sources, targets, pairs=[("embed", "a"), ("embed", "b")])
    assert pairs == {"a": ("embed", "given"), "b": ("embed", "given")}


def test_the_last_number_of_a_name_stands_for_a_name_of_the_other_side() -> None:
    keras = layers("conv2_block1_0_conv", *(f"conv2_block{n}_3_conv" for n in (1, 2, 3)))
    torch = layers(*(f"layer1/{n}/conv3" for n in range(3)), "layer1/0/downsample/0")
    expected = {f"layer1/{n}/conv3": f"conv2_block{n + 1}_3_conv" for n in range(3)}
    expected["layer1/0/downsample/0"] = "conv2_block1_0_conv"
    assert {t: s for t, (s, _) in solved(keras, torch).items()} == expected
    solution = solve(torch, keras)
    assert {s: t for t, (s, _) in pairs(torch, keras, solution).items()} == expected
    assert {*solution.numbered} == {*solution.pairs}
    # As many of each number, or another count.
    for other in (
        layers("b1_0_c", "b2_0_c", "b1_3_c", "b2_3_c"),
        layers("b1_0_c", "b2_1_c", "b3_2_c", "b4_3_c"),
    ):
        assert not solve(other, torch).pairs


def test_modules_that_shapes_pair_are_not_exchanged_by_rows_of_numbers() -> None:
    # By their numbers alone, `block_1` and `block_2` would be `mab0` and `mab1`, and `start` would be `pma`.
    sources = layers(
        *("start/query:a", "start/key:b", "start/out:a", "start/norm:n"),
        *("block_1/query:b", "block_1/key:a", "block_1/out:a", "block_1/norm:n"),
        *("block_2/query:a", "block_2/key:a", "block_2/out:a", "block_2/norm:n"),
    )
    targets = layers(
        *("mab0/fc_q:a", "mab0/fc_k:b", "mab0/fc_o:a", "mab0/ln:n"),
        *("mab1/fc_q:b", "mab1/fc_k:a", "mab1/fc_o:a", "mab1/ln:n"),
        *("pma/fc_q:a", "pma/fc_k:a", "pma/fc_o:a", "pma/ln:n"),
    )
    modules = {"mab0": "start", "mab1": "block_1", "pma": "block_2"}
    filled = solved(sources, targets)
    assert len(filled) == len(targets)
    assert {target.split("/")[0]: source.split("/")[0] for target, (source, _) in filled.items()} == modules
    assert all(
        modules[target.split("/")[0]] == source.split("/")[0] for target, (source, _) in filled.items()
    )


def created(*row: LayerCandidate, order: str = "file") -> list[LayerCandidate]:
    """Return layers with the positions at which their program created them."""
    return [one._replace(created=frozenset({(order, n)})) for n, one in enumerate(row)]


@pytest.mark.parametrize(
    ("sources", "targets", "decided"),
    [
        ("inner outer", "x y", True),
        ("b/inner b/outer c/inner c/outer", "x/a x/b y/a y/b", True),
        ("head body", "x y", False),  # a head is not called first
        ("inner outer", "in0 mid", True),
        ("inner outer", "mid in0", False),
        ("gate up", "up gate", False),  # the words of both sides
        ("b/inner b/outer outer", "x/a y/a y/b", False),  # modules with other numbers of layers
        ("fc2 fc1", "x y", False),  # numbers of the program
    ],
)
def test_an_order_of_creation_decides_only_what_nothing_contradicts(
    sources: str, targets: str, decided: bool
) -> None:
    having, wanting = created(*layers(*sources.split())), called(*layers(*targets.split()))
    assert all(pair.by != "creation" for pair in solve(having, wanting).pairs)
    solution = solve(having, wanting, by_creation=True)
    in_order = [(n, n, "creation") for n in range(len(having))]
    if decided:
        assert [tuple(pair) for pair in solution.pairs] == in_order
    else:
        assert "creation" not in {pair.by for pair in solution.pairs}


def test_an_order_of_creation_needs_one_call_after_the_other() -> None:
    having = created(*layers("value", "advantage"))
    assert solve(having, called(*layers("x", "y"), chain=False), by_creation=True).pairs == ()
    # Keras counts the layers of each class.
    counted = created(*layers("first", "second"), order="dense")
    sources = [*counted[:1], counted[1]._replace(created=frozenset({("conv2d", 1)}))]
    assert solve(sources, called(*layers("x", "y")), by_creation=True).pairs == ()
    assert len(solve(counted, called(*layers("x", "y")), by_creation=True).pairs) == 2


def test_matched_layers_that_were_created_otherwise_contradict_an_order() -> None:
    # U-Net: one side numbers the upsampling layers from the inside, the other one from the outside.
    names = ["inc", "down", "up1:up", "conv_a", "up2:up", "conv_b"]
    targets = called(*layers("enc1", "enc2", "up2:up", "dec2", "up1:up", "dec1"))
    solution = solve(created(*layers(*names)), targets, by_creation=True)
    assert {pair.by for pair in solution.pairs} == {"name"}
    named = [one._replace(name=(f"layer_{letter}",)) for one, letter in zip(targets, "uvwxyz", strict=True)]
    solution = solve(created(*layers(*names)), named, by_creation=True)
    assert [pair.source for pair in solution.pairs] == list(range(6))


def test_tensors_of_a_class_that_creates_the_same_shapes_in_the_same_order() -> None:
    def lone(*texts: str) -> list[LayerCandidate]:
        return created(*(one._replace(lone=True) for one in layers(*texts)))

    for shapes, decided in (("v v", True), ("v m v", False)):
        sources = lone(*(f"grn/vars/{n}:{shape}" for n, shape in enumerate(shapes.split())))
        targets = lone(*(f"norm/{name}:{shape}" for name, shape in zip("ab", "vv", strict=True)))
        solution = solve(sources, targets, by_creation=True)
        assert [(pair.source, pair.target) for pair in solution.pairs] == (
            [(0, 0), (1, 1)] if decided else []
        )


def test_words_do_not_take_a_layer_out_of_the_module_of_its_siblings() -> None:
    # `hyper` is the class of a mixing network's modules in Keras, and a word of one layer in PyTorch.
    sources = layers("hyper/hidden", "hyper/out:w", "hyper_1/hidden", "hyper_1/out:v", "bias_first")
    targets = layers("hyper_w/0", "hyper_w/2:w", "hyper_b", "V/0", "V/2:v")
    solution = solve(sources, targets)
    assert pairs(sources, targets, solution) == {
        "hyper_w/0": ("hyper/hidden", "only fit"),
        "hyper_w/2": ("hyper/out", "only fit"),
        "hyper_b": ("bias_first", "only fit"),
        "V/0": ("hyper_1/hidden", "only fit"),
        "V/2": ("hyper_1/out", "only fit"),
    }
    assert [sources[pair.source].title for pair in solution.inner] == ["hyper_1/hidden"]


@pytest.mark.parametrize(
    ("sources", "targets", "expected"),
    [
        ("dynamics/0 reward/0", "rew_a dyn_a", ["reward/0", "dynamics/0"]),
        ("wq wk wv wo", "out_proj v_proj k_proj q_proj", ["wo", "wv", "wk", "wq"]),
        ("pos_a norm_a", "position_b posterior_b", []),  # of which word it is short is open
        ("downs/0 ups/0", "up down", []),
    ],
)
def test_abbreviated_words_are_words(sources: str, targets: str, expected: list[str]) -> None:
    matched = solved(layers(*sources.split()), layers(*targets.split()))
    assert [name for name, by in matched.values()] == expected
    assert {by for _, by in matched.values()} <= {"words", "only fit"}
