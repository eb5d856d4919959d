"""Networks: frozen graphs of typed layers, backends, and worker processes."""

from typing import TYPE_CHECKING

from ckpttool import package_face

if TYPE_CHECKING:
    from ckpttool.networks.build import (
        NetworkBuilder as NetworkBuilder,
        NetworkSettings as NetworkSettings,
        add_gru as add_gru,
        add_lstm as add_lstm,
        policy_network as policy_network,
        q_network as q_network,
        value_network as value_network,
    )
    from ckpttool.networks.live import (
        audit as audit,
        compare_names as compare_names,
        copy_values as copy_values,
    )
    from ckpttool.networks.live_trees import (
        flatten_with_path as flatten_with_path,
        object_graph as object_graph,
        state_dict as state_dict,
        submodules as submodules,
        tensor_identity as tensor_identity,
        walk_values as walk_values,
    )
    from ckpttool.networks.network import (
        NOISE as NOISE,
        Activation as Activation,
        Add as Add,
        Affine as Affine,
        ArgMax as ArgMax,
        AtomMean as AtomMean,
        Backend as Backend,
        Clip as Clip,
        Concat as Concat,
        ConstantRow as ConstantRow,
        Convolution as Convolution,
        Cosines as Cosines,
        Dense as Dense,
        Exp as Exp,
        Flatten as Flatten,
        InputAdapter as InputAdapter,
        Layer as Layer,
        LayerNorm as LayerNorm,
        Multiply as Multiply,
        Network as Network,
        Node as Node,
        Observation as Observation,
        Policy as Policy,
        QuantileMean as QuantileMean,
        Repeat as Repeat,
        Slice as Slice,
        Softmax as Softmax,
        State as State,
        StateSlot as StateSlot,
        Transpose as Transpose,
        assemble as assemble,
        dtype_of as dtype_of,
        look_up as look_up,
        network_arrays as network_arrays,
        select_member as select_member,
        stack_networks as stack_networks,
        stack_structure as stack_structure,
        value_shapes as value_shapes,
    )
    from ckpttool.networks.numpy_backend import (
        backpropagate as backpropagate,
        forward_values as forward_values,
    )
    from ckpttool.networks.policy_training import (
        Learner as Learner,
        TrainedWeights as TrainedWeights,
        train_learner as train_learner,
        trained_arrays as trained_arrays,
    )
    from ckpttool.networks.torch_backend import (
        Float32Precision as Float32Precision,
        TorchPolicy as TorchPolicy,
        device_error as device_error,
        is_out_of_memory as is_out_of_memory,
    )
    from ckpttool.networks.torch_programs import capture_graph as capture_graph
    from ckpttool.networks.tracing import Trace as Trace, probe_module as probe_module
    from ckpttool.networks.worker import ModelSpec as ModelSpec, Worker as Worker

package_face()
