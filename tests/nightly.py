"""Cases of tests with many cases of one kind that only `make nightly` runs, as if they were marked `slow`.

The suite keeps a case of every kind: what each row leaves in it is in the row's comment. A pattern is a
regular expression for whole names of cases (what is between the brackets); None stands for a whole test. A
new case runs in the suite until a pattern fits it. tests/test_structure.py finds rows that fit nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

NIGHTLY: dict[str, dict[str, str | None]] = {
    # Shards by two processes, a distributed checkpoint by one, in a store of each kind.
    "test_remote_writes": {
        "test_an_object_store_has_the_bytes_of_local_files": r".*model\.safetensors.*-None|.*dcp.*-2"
    },
    # Three processes, a source in HDF5 and one in shards.
    "test_shards": {
        "test_an_agent_in_shards_is_the_agent_in_one_file": "None|1",
        "test_torch_loads_a_distributed_checkpoint": "None",
        "test_sources_of_every_format_reach_other_processes_and_runs": r"x\.(npz|safetensors|pt)|tf-1",
    },
    # Every algorithm acts as its library does; test_layout_stable_baselines3 has the agents of the zoo.
    "test_load_agent": {"test_the_agents_of_the_zoo_predict_as_their_library": None},
    # Acrobot once, by a policy.
    "test_envs_classic": {
        "test_every_number_of_whole_episodes_is_gymnasiums": "Acrobot-v1-at_random",
    },
    # A crafted file is such a bomb; its memory and its time are limited there.
    "test_format_npz": {"test_a_bomb_is_refused_and_not_unpacked": None},
    # `python -m tests.agent_truth`, which `make nightly` starts, runs all agents.
    "test_agent_truth": {
        "test_actors_of_keras_have_the_recorded_verdicts": None,
        "test_agents_of_a_library_have_the_recorded_verdicts": r"sb3_more",
        "test_variants_of_a_program_have_the_recorded_verdicts": None,
        "test_agents_of_programs_have_the_recorded_verdicts": None,
    },
    # The page of modules, which has the parts of a report, as on a phone.
    "test_accessibility": {
        "test_the_page_of_modules_can_be_used_by_all": "wide-dark",
        "test_a_report_can_be_used_by_all": None,
    },
    # The sizes 1 and 64.
    "test_backends": {"test_agrees_with_the_reference": r"(actor|critic)-3"},
    # Its other tests compare what is written and the order of steps; damage in the first and the last tensor.
    "test_behind": {
        "test_memory_is_that_of_a_few_tensors": None,
        "test_a_damaged_tensor_in_the_middle": "7",
    },
    # One of each way in which a number hides a fault.
    "test_blind_models": {
        "test_a_fault_that_outputs_hide_does_not_pass": (
            r"Saturated|Large|Words|Steps|Twice|Fixed|Attended|Padded"
        )
    },
    # Commands that look, convert, play, open the browser, and print tables.
    "test_cli": {
        "test_a_process_answers_as_the_command_line_in_this_one": (
            r"stats|check|textconv|report|layouts|backends"
            r"|limits|doctor|digest|schema"
        )
    },
    # The pages that are run in a few seconds, most of them; each page is still read for links and tags.
    "test_docs": {
        "test_the_blocks_run": (
            r"docs/(howto/(prove_a_conversion|show_a_checkpoint|continue_training|see_an_agent"
            r"|own_model|compare_two_algorithms|live_objects)|solved)\.md"
        )
    },
    # One version of most tasks of MuJoCo; single steps of all are compared as well.
    "test_envs_mujoco": {
        "test_whole_episodes_from_four_seeds_are_gymnasiums": (
            r"Hopper-v\d|Swimmer-v\d|Pusher-v5|Inverted(Double)?Pendulum-v4"
            r"|Reacher-v4|Humanoid-v5|Ant-v5"
        )
    },
    # Every library and every kind of values, Tianshou's first version once; lists of Stable-Baselines 2 once.
    # Every agent to PyTorch and ONNX, and one of each library to all.
    "test_discrete_agents": {
        "test_an_agent_chooses_as_its_library_does": (
            r"tianshou-(c51|qrdqn|dueling|rainbow)-1\.x|tianshou-dueling-c51|rllib-(dueling|c51)|"
            r"elegantrl-QNet(Duel|Twin)|sb2-(dueling|ppo2|a2c)-list|d3rlpy-(cql|bc)"
        ),
        "test_a_converted_agent_chooses_the_same": (
            r"(tianshou-(?!dueling-1)|skrl-ppo|rl_games-separate|d3rlpy-(?!qr)).*-(tf|safetensors)"
        ),
    },
    # `python -m tests.everyday --check`, which `make nightly` starts, runs all cells.
    "test_everyday": {"test_a_part_of_the_matrix_has_the_recorded_states": None},
    # `verify` and `browse` of a file and of an empty folder, `browse` of bundles and runs; the commands that
    # only look, of all folders, but for the kinds that differ in names.
    "test_folders": {
        "test_a_command_names_the_checkpoint_first": r"(?!one file-|empty-).*-verify(, second)?|"
        r"(?!one |empty|a run |two )(.*)-browse",
        "test_a_command_takes_a_folder": (
            r"(a file in|a run in|numbered|different|one file and).*-(stats|doctor"
            r"|report|inspect, drawn|diff, second)"
        ),
    },
    # Every optimizer from one container, and one optimizer from every container.
    "test_general_conversion": {
        "test_the_tutorials_checkpoint_trains_on_in_keras": r"_h5-(?!adam-).*",
        "test_tensorflows_files_train_on_in_torch": (
            r"(adamw|sgd|adagrad|adamax|adadelta|rmsprop)-\{\}_mlp("
            r"_compiled.*|\.weights\.h5|\.h5|\.keras).*|adam-\{\}_cnn_(listed|functional)\.h5"
        ),
    },
    # Each end of the encoder with one kind of file, and both kinds with one end.
    "test_film": {
        "test_an_encoder_that_fails_leaves_no_film": r"\.mp4-(cut short|at the end)",
    },
    # A file of each framework and library once; test_pairs converts the other forms of these two agents.
    "test_paired_returns": {
        "test_a_conversion_is_paired_with_its_source": r"legacy td3 to tf|sb2 pkl to torch|td3 to cleanrl",
    },
    # Each wrapper with each algorithm, from one of two files.
    "test_spaces": {
        "test_rescaled_spaces_are_refused_and_the_hint_plays_as_in_training": r".*-SAC-pt|.*-(PPO|TD3)-zip",
    },
    # As in test_torch_tensors; test_object_graph has cycles and chains.
    "test_format_saved_model": {
        "test_a_hundred_thousand_nodes": None,
        "test_any_damage_is_a_note_or_an_error_of_ours": None,
        "test_cycles_and_long_chains_of_objects": None,
    },
    # All names and roots in TensorFlow's object graph, whose own names they may be; a few in other formats.
    "test_loading": {
        "test_a_root_of_any_kind_is_converted_or_refused": r"(?!array|number|list|numbered).*-(?!tf$).*",
        "test_whatever_fails_fails_before_anything_is_written": (
            r"(?!iter-|model-|0-|policy-).*-(?!tf-)\w+-1"
        ),
    },
    # Rollouts of Pendulum, whose loop the test of a copy runs, one way of three to copy, and one of each kind
    # of fault.
    "test_gpu_command": {
        "test_a_leak_is_found": None,
        "test_a_part_is_green_on_the_cpu": (
            r"(rollouts of )?MountainCarContinuous-v0( in the loop)?|Pendulum-v1 in the loop|64 policies"
            r"|steps on the host"
            r"|64 checkpoint files|memory after evaluations|uploads of an evaluation"
        ),
        "test_an_extra_copy_in_the_loop_is_found": r"item|to",
        "test_more_uploads_are_found": None,
        "test_a_fault_is_found": (
            r"(actors|image policies|stacked policies|rollouts of Pendulum-v1), no bias"
            r"|actors, TF32"
        ),
    },
    # test_object_graph has a graph as deep, and other crafted files are as large.
    "test_hostile": {
        "test_a_crafted_file_gets_its_verdict_and_nothing_more": (
            r"graph-50000-deep|safetensors-padding-of-100-MB"
        ),
    },
    # One of HDF5's ways to name another file; the test of all crafted files watches each without strace.
    "test_hostile_traced": {"test_looking_changes_nothing_and_asks_nobody": r"hdf5-(external-link|virtual)"},
    # Other files of the formats.
    "test_inert_output": {
        "test_no_string_of_a_file_reaches_the_reader_raw": r"names\.npz|surrogate\.pkl|none\.pt",
        "test_pages_and_drawings_show_strings_as_text": r"surrogate\.pkl|torch\.pt",
    },
    # Bundles of less than 4 GiB are in test_format_tensor_bundle; the offsets beyond are in nothing else.
    "test_large_bundles": {"test_what_lies_beyond_four_gib_is_written_and_read": None},
    # `python -m tests.layer_grid`, which `make nightly` starts, runs every cell.
    "test_layer_grid": {"test_layers_give_equal_outputs_or_are_refused": None},
    # Each of the layouts to PyTorch and Tianshou, and one of them to all; a stream under one name; each way
    # to state the bounds in one form, and each form with one of them.
    "test_layout_fujimoto": {
        "test_a_set_of_any_spelling": r"\.(pth|pt|pkl)-stream",
        "test_an_optimizer_alone_points_to_its_agent": r"(td3_with_suffix|ddpg)-(tf|keras)",
        "test_buffers_with_the_action_map_are_taken": (
            r"(largest action|one scale)-(one dict without targets|set of files)"
        ),
        "test_targets_are_the_copies_that_their_load_makes": (
            r"(td3_with_suffix|our_ddpg|ddpg)-(tf|tf1|skrl|keras)"
        ),
    },
    # Each module and each activation; both containers of one.
    "test_layout_spinningup": {
        "test_a_whole_module_acts_as_its_classes_do": r".*-(Tanh|ELU|SiLU|LeakyReLU)-stream"
    },
    # The rows are also compared with made trees of every layout.
    "test_library_rows": {"test_the_corpus": None},
    # `python -m tests.model_pairs --check`, which `make nightly` starts, runs all pairs.
    "test_model_twins": {"test_a_sample_of_twins_computes_the_same": None},
    # The other nestings, before and after; there and back, two of those after.
    "test_nestings": {
        "test_there_and_back_every_variable_lies_where_it_lay": r"(?!normed|twin).*-after.*",
        "test_converted_agents_compute_the_same": r"sequential-after.*|twin-before.*",
    },
    # The shapes of graphs that had been slow by themselves; these differ in the place of their edges.
    "test_object_graph": {
        "test_broad_graphs_are_read_in_bounded_time": r"list|prefixes|one key|one attribute|slots|children",
        "test_agents_are_named_as_the_live_objects": r"(sequential|twin)-(before|after)-none",
    },
    # The optimizers of Keras 3, of Keras before it (legacy) and of TensorFlow 1; none that tf_keras wrote.
    "test_optimizers": {
        "test_training_goes_on_in_torch_and_the_way_back_is_exact": (
            r"keras2-.*|legacy-(centered|momentum)"
            r"|keras3-(momentum|centered)"
        )
    },
    # Each backend, one row and several, with and without scaling.
    "test_policy_layers": {"test_images": r".*-1-False|.*-7-True"},
    # One pair of each framework's way to order kernels.
    "test_real_pairs": {
        "test_a_pair_is_one_agent": r"DDPG of Stable-Baselines 2|TD3 of the authors' code",
    },
    # An example, whose conversions and training steps have tests of their own.
    "test_resume_example": {"test_there_and_back": None},
    # Agents of Pendulum, MountainCar and LunarLander; none of MuJoCo, whose steps test_envs_mujoco compares.
    "test_returns": {
        "test_agents_score_what_they_scored": (r"TD3_HalfCheetah.*|TD3_(BipedalWalker|Lunar).*"),
        "test_tensorflow_1_agents_score_what_their_author_published": (
            r"td3_LunarLander.*|ddpg_Pend.*|sac_.*"
        ),
    },
    # What a page of tensors does in a browser; these are about its size, paper and phones.
    "test_report_browser": {
        "test_ten_thousand_tensors_open_in_half_a_second": None,
        "test_on_paper_the_tree_is_whole_and_light": None,
        "test_a_phone_scrolls_one_way": None,
    },
    # A word of each kind of error (case, a letter, an ending) and each target.
    "test_side_files": {
        "test_an_unknown_target_names_the_one_that_is_meant": (
            r"tensor_flow.*|pt-torch|keras3.*|PyTorch.*"
            r"|stable-baselines3.*"
        ),
        "test_statistics_point_to_their_agent": r"(torch|keras)-(vecnormalize|vec_normalize)\.pkl",
    },
    # Without a cluster; one that is refused stays as well.
    "test_sweep": {"test_a_cluster_that_loses_a_worker_loses_nothing_and_counts_nothing_twice": None},
    # Each algorithm and each kind of optimizer once.
    "test_train_policies": {
        "test_the_frameworks_make_the_reference_updates": r"(PPO, Nesterov|A2C, RMSprop|A2C, momentum"
        r"|A2C, centered.*)-3"
    },
    # The two networks that are computed in most steps; the others are in the test of mutants.
    "test_train_step": {
        "test_the_frameworks_make_the_same_updates": (
            r"TD3 with TensorFlow's epsilon and AMSGrad.*|DDPG with L2.*"
        )
    },
    # Every mutation that exists, once; the way from TensorFlow to PyTorch has them all.
    "test_verify_all": {
        "test_each_mutant_is_named": r"td3 of torch to (tf: (?!count).*|keras: (?!updates).*"
        r"|safetensors: (?!a square).*)",
    },
    # A fault of each kind: weights, order, shape, statistics, numbers, activations, structure.
    "test_verify_models": {
        "test_a_planted_fault_is_found_in_its_layer": (
            r"swapped heads|EMA for raw weights|q/k swapped|gate order of "
            r"GRU|stride order|channel order|layer order|q/k layers swapped|padding mode|"
            r"frozen scale|dilation"
            r"|missing bias|normaliser|permuted flatten|padding"
        ),
        "test_a_torch_model_is_equal_to_itself": (
            r"gru|text|vision|block|residual|upsampler|separable|squeeze|temporal|volume|fused|gated|vae|dueling|"
            r"mixture|normalized|slopes|groups|recommender|pixels"
        ),
        "test_an_onnx_file_runs": "cnn",
    },
    # Each object and each container: all containers of a module, and all objects in a zip and a pickle.
    "test_whole_modules": {
        "test_every_tensor_of_an_object_has_torchs_name": (
            r"(?!module-).*-(zip, protocol 5|cloudpickle in a stream"
            r"|pickle, protocol \d|cloudpickle)"
        ),
        "test_150000_paths_of_one_tensor_take_linear_time": "array",
        "test_one_storage_is_not_taken_apart_again_and_again": None,
    },
    # Each start, and each kind of metadata.
    "test_working_directory": {
        "test_no_entry_point_is_loaded_from_the_working_directory": (
            r"(-m|script|standard input|.* element)"
            r"-egg(-info)?"
        )
    },
    # Each end for an indexed checkpoint, a killed process for all.
    "test_writing": {
        "test_a_conversion_that_is_killed_leaves_old_or_new": "fujimoto",
        "test_whatever_ends_it_at_any_step_leaves_old_or_new": (
            r"(single|several)-(over|fresh)-(EIO|EIO, no links|Ctrl-C)"
        ),
    },
    # The list of classes changes with Keras alone; a model of each way to act in every container.
    "test_keras_names": {
        "test_every_class_of_keras_3_is_known": None,
        "test_acting_models_are_found_and_refused_in_every_container": (
            r"vocabulary in bytes|residual code|class method|symbol function|"
            r"function my\.own\.square|symbol random.*"
        ),
    },
    # The contract of all formats flips and cuts too, and test_hostile_fuzz gives damage to every parser.
    "test_torch_tensors": {
        "test_damaged_parts_raise_only_our_errors": None,
    },
    # As in test_torch_tensors.
    "test_hdf5": {
        "test_damage_never_gets_past_a_ckpttool_error": None,
    },
    # As in test_torch_tensors.
    "test_format_tensor_bundle": {
        "test_damage_under_sound_checksums": None,
        "test_bit_flips_in_tensorflows_files": None,
    },
    # As in test_torch_tensors.
    "test_wire_npy": {
        "test_damage_raises_only_our_errors": None,
    },
    # As in test_torch_tensors.
    "test_format_v1": {
        "test_no_damage_escapes_the_family_of_errors": None,
        "test_every_truncation": None,
    },
    # As in test_torch_tensors; a crafted file of safetensors has many tensors.
    "test_format_pytorch": {
        "test_bit_flips_never_give_other_data": None,
        "test_8000_tensors_are_listed_quickly": None,
    },
    # As in test_torch_tensors and test_format_pytorch.
    "test_format_pytorch_legacy": {
        "test_every_truncation_is_one_sentence": None,
        "test_8000_storages_are_listed_quickly": None,
    },
    # As in test_torch_tensors.
    "test_format_keras_zip": {
        "test_a_fuzz_of_archives": None,
    },
    # As in test_torch_tensors; crafted files lie about zip64 records, and have 70,001 members.
    "test_wire_zip": {
        "test_single_bit_flips_are_refused_or_harmless": None,
        "test_70001_members_are_listed_quickly": None,
        "test_zip64_records_are_read_and_their_lies_refused": None,
    },
    # A mutant file of every reader, and of each of its checksums.
    "test_differential": {
        "test_no_flip_turns_checksums_off_and_hides_behind_it": r"3-True",
        "test_readers_agree_about_mutants": (
            r"npz-deflated|npy|rllib-pickle|hdf5-(gzip|fletcher32|types|indexes)|tf-bundle-both"
        ),
    },
    # A crafted file has 50,000 tensors.
    "test_format_safetensors": {
        "test_many_tensors_are_listed_in_linear_time": None,
    },
    # One order of ten thousand layers.
    "test_solver": {
        "test_ten_thousand_layers_take_no_square_of_that": r"False",
        "test_ten_thousand_layers_under_other_words_take_no_square_of_that": None,
    },
    # test_object_graph and crafted files are deep too.
    "test_drawing": {
        "test_a_deep_tree_needs_no_recursion": None,
    },
    # The smaller models.
    "test_first_minute": {
        "test_a_large_model_fits_the_screen": r"833-9997",
    },
    # The pages are tested by test_docs.
    "test_site": {
        "test_the_site_is_built_and_fetches_nothing": None,
    },
    # It changes with constraints.txt alone.
    "test_packaging": {
        "test_the_pinned_environment_has_no_conflicts": None,
    },
    # `python -m tests.model_pairs --check` runs all pairs.
    "test_model_pairs": {
        "test_the_hint_for_a_model_that_lists_a_layer_that_reorders_axes_works": None,
        "test_a_file_that_holds_the_computation_determines_every_order": r"torch-.*",
    },
    # Both forms of TensorFlow; test_general_conversion has that of Keras.
    "test_to_tensorflow": {
        "test_the_other_form_plays_the_same_and_trains_on": r"named_of_keras.*",
    },
    # test_general_conversion trains on in Keras from its files.
    "test_train_models": {
        "test_every_file_of_keras_restores_its_optimizer": None,
    },
    # Results of several files and of one environment.
    "test_run_report": {
        "test_results_of_another_run_are_not_mixed_in": None,
        "test_returns_in_several_environments_are_several_curves": None,
    },
    # Two, ten and many episodes.
    "test_statistics": {
        "test_scipy_computes_the_same_statistics": r"3|50|256",
    },
    # With names; the trees of the other test have none.
    "test_tensorflow_writes": {
        "test_whatever_was_read_is_written_or_refused": r"False",
    },
    # Two of twelve seeds.
    "test_tensorflow_reads": {
        "test_random_trees": r"[2-9]|1[01]",
    },
    # Every library from and to PyTorch, TensorFlow and one other; the pairs of the others are those two
    # ways joined.
    "test_pairs": {
        "test_there_and_back": (
            r"(cleanrl|tianshou|spinningup|rsl_rl|fasttd3|skrl|elegantrl|d3rlpy|tf2rl|tf_agents|"
            r"acme|keras_rl|rllib|sb2)-(?!torch|tf$|fujimoto).*"
        ),
    },
    # Each container in two others, and two in each.
    "test_gate": {
        "test_code_is_found_in_whatever_holds_it": r"(bz2|xz|lzma|gzip)-(?!zlib|tar).*",
    },
    # Every algorithm to PyTorch, and PPO, SAC and DQN to all; every algorithm as the library saves a policy,
    # and two of them in each other form.
    "test_layout_stable_baselines3": {
        "test_a_policy_alone_acts_as_the_library_does": r"(a2c|sac|dqn)-(state|whole)",
        "test_every_algorithm_converts_with_its_optimizer": (
            r"(ppo_gsde|ppo_discrete|a2c_\w+|sac_fixed|sac_gsde|td3)-(tf|keras)"
        ),
    },
    # Every format, back to one framework at least.
    "test_undo": {
        "test_every_sample_comes_back_from_everywhere": (
            r"(tf1|cleanrl|safetensors)-torch|(npz|fujimoto)-tf"
        ),
    },
    # Each pair of formats, and each option with one. Conversions, and commands that read one file.
    "test_reads": {
        "test_work_grows_as_the_tensors": "diff",
        "test_a_conversion_reads_the_source_twice_and_the_target_once": (
            r"True-(safetensors-npz|keras-torch)-.*|False-(tf-torch|torch-tf)-False"
        ),
    },
    # Plots of episodes, runs and algorithms, each with its longest names; the same bytes of one plot.
    "test_plots": {
        "test_the_same_numbers_give_the_same_bytes": "runs, logged",
        "test_no_text_covers_another_and_nothing_is_cut_off": (
            r"few|equal|a run|algorithms by their last checkpoint|algorithms nearly equal|"
            r"one algorithm"
        ),
        "test_ticks_are_whole_numbers": r"0\.0-.*",
    },
    # Agents that look at pictures and numbers at once.
    "test_fronts": {
        "test_the_command_plays_them": r"SAC-Pictures",
    },
    # test_pairs and test_to_tensorflow have the way from TensorFlow and back.
    "test_round_trips": {
        "test_tensorflow_there_and_back": None,
    },
    # A start as the installed script.
    "test_interrupts": {
        "test_an_interrupt_ends_a_start_without_a_traceback": r"60--m",
    },
    # A state of every kind; as in test_torch_tensors.
    "test_format_pytorch_dcp": {
        "test_any_cut_is_put_together": None,
    },
    # One number of further checkpoints.
    "test_simulators": {
        "test_several_checkpoints_play_in_it": r"more[12]",
    },
}


def case_of(item: pytest.Function) -> str:
    """Return what is between the brackets of a test's name."""
    return str(item.name)[len(item.originalname) + 1 : -1]


# Modules that were collected, and rows that fitted a test.
COLLECTED = pytest.StashKey[set[str]]()
FITTED = pytest.StashKey[set[tuple[str, str]]]()


def mark(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Mark the cases of the table as `slow`."""
    collected = config.stash[COLLECTED] = set()
    fitted = config.stash[FITTED] = set()
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        module, name = item.module.__name__.rpartition(".")[2], item.originalname
        collected.add(module)
        rows = NIGHTLY.get(module, {})
        if name in rows and ((pattern := rows[name]) is None or re.fullmatch(pattern, case_of(item))):
            fitted.add((module, name))
            item.add_marker(pytest.mark.slow)
