"""TensorFlow operations that only compute, and the audit of a graph against this list."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from ckpttool.core import deferred
from ckpttool.core.code_references import CODE, CodeReference, merge_references, relocate_references
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import File
from ckpttool.encodings import protobuf
from ckpttool.formats.pickle_signatures import scan_head
from ckpttool.formats.tf_common import is_inside
from ckpttool.formats.tf_saved_model_messages import FieldMeter, node_name

# Source: the operation registry of TensorFlow 2.21.0 (TF_GetAllOpList). The pure operations are those that
# are not stateful there, without the ones that read or write files or memory by name, connect to other
# processes, call Python or compiled programs, decode graphs, end the process, or exist for tests and for TPUs
# only; and the stateful ones whose state is in memory (variables, random numbers, tables, queues, iterators)
# or that call functions, whose bodies are judged themselves. An operation on no list is a finding.
_STATELESS = (
    "Abs AccumulateNV2 AccumulatorApplyGradient AccumulatorNumAccumulated AccumulatorSetGlobalStep "
    "AccumulatorTakeGradient Acos Acosh Add AddN AddV2 AdjustContrast AdjustContrastv2 AdjustHue "
    "AdjustSaturation All Angle Any ApplyAdaMax ApplyAdadelta ApplyAdagrad ApplyAdagradDA ApplyAdagradV2 "
    "ApplyAdam ApplyAddSign ApplyCenteredRMSProp ApplyFtrl ApplyFtrlV2 ApplyGradientDescent ApplyMomentum "
    "ApplyPowerSign ApplyProximalAdagrad ApplyProximalGradientDescent ApplyRMSProp ApproxTopK "
    "ApproximateEqual ArgMax ArgMin AsString Asin Asinh AssertCardinalityDataset AssertNextDataset "
    "AssertPrevDataset Assign AssignAdd AssignSub Atan Atan2 Atanh AudioMicrofrontend AudioSpectrogram "
    "AudioSummary AudioSummaryV2 AutoShardDataset AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad "
    "BandedTriangularSolve BarrierClose BarrierIncompleteSize BarrierInsertMany BarrierReadySize "
    "BarrierTakeMany Batch BatchCholesky BatchCholeskyGrad BatchDataset BatchDatasetV2 BatchFFT BatchFFT2D "
    "BatchFFT3D BatchFunction BatchIFFT BatchIFFT2D BatchIFFT3D BatchMatMul BatchMatMulV2 BatchMatMulV3 "
    "BatchMatrixBandPart BatchMatrixDeterminant BatchMatrixDiag BatchMatrixDiagPart BatchMatrixInverse "
    "BatchMatrixSetDiag BatchMatrixSolve BatchMatrixSolveLs BatchMatrixTriangularSolve "
    "BatchNormWithGlobalNormalization BatchNormWithGlobalNormalizationGrad BatchSelfAdjointEig "
    "BatchSelfAdjointEigV2 BatchSvd BatchToSpace BatchToSpaceND BesselI0 BesselI0e BesselI1 BesselI1e "
    "BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Betainc BiasAdd BiasAddGrad "
    "BiasAddV1 Bincount Bitcast BitwiseAnd BitwiseOr BitwiseXor BlockLSTM BlockLSTMGrad BlockLSTMGradV2 "
    "BlockLSTMV2 BoostedTreesAggregateStats BoostedTreesBucketize BoostedTreesCalculateBestFeatureSplit "
    "BoostedTreesCalculateBestFeatureSplitV2 BoostedTreesCalculateBestGainsPerFeature "
    "BoostedTreesMakeQuantileSummaries BoostedTreesMakeStatsSummary BoostedTreesSparseAggregateStats "
    "BoostedTreesSparseCalculateBestFeatureSplit BroadcastArgs BroadcastGradientArgs BroadcastTo Bucketize "
    "BytesProducedStatsDataset CSRSparseMatrixComponents CSRSparseMatrixToDense "
    "CSRSparseMatrixToSparseTensor CTCBeamSearchDecoder CTCGreedyDecoder CTCLoss CTCLossV2 Cast Ceil "
    "CheckPinned Cholesky CholeskyGrad ChooseFastestBranchDataset ChooseFastestDataset ClipByValue "
    "CombinedNonMaxSuppression Complex ComplexAbs CompositeTensorVariantFromComponents "
    "CompositeTensorVariantToComponents CompressElement ComputeAccidentalHits ComputeBatchSize Concat "
    "ConcatOffset ConcatV2 ConcatenateDataset Conj ConjugateTranspose Const ControlTrigger Conv Conv2D "
    "Conv2DBackpropFilter Conv2DBackpropFilterV2 Conv2DBackpropInput Conv2DBackpropInputV2 Conv3D "
    "Conv3DBackpropFilter Conv3DBackpropFilterV2 Conv3DBackpropInput Conv3DBackpropInputV2 Cos Cosh "
    "CountUpTo CropAndResize CropAndResizeGradBoxes CropAndResizeGradImage Cross CudnnRNNCanonicalToParams "
    "CudnnRNNCanonicalToParamsV2 CudnnRNNParamsSize CudnnRNNParamsToCanonical CudnnRNNParamsToCanonicalV2 "
    "Cumprod Cumsum CumulativeLogsumexp DataFormatDimMap DataFormatVecPermute DatasetCardinality "
    "DatasetFingerprint Dawsn DebugGradientIdentity DebugGradientRefIdentity DecodeAndCropJpeg DecodeBase64 "
    "DecodeBmp DecodeCSV DecodeCompressed DecodeGif DecodeImage DecodeJSONExample DecodeJpeg DecodeJxl "
    "DecodePaddedRaw DecodePng DecodeRaw DecodeWav DecodeWebP DenseBincount DenseCountSparseOutput "
    "DenseToCSRSparseMatrix DenseToDenseSetOperation DenseToSparseBatchDataset DenseToSparseSetOperation "
    "DepthToSpace DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter "
    "DepthwiseConv2dNativeBackpropInput Dequantize DeserializeManySparse DeserializeSparse "
    "DestroyTemporaryVariable Diag DiagPart Digamma Dilation2D Dilation2DBackpropFilter "
    "Dilation2DBackpropInput DirectedInterleaveDataset Div DivNoNan DrawBoundingBoxes DrawBoundingBoxesV2 "
    "DynamicPartition DynamicStitch EditDistance Eig Einsum Elu EluGrad EmptyTensorList EmptyTensorMap "
    "EncodeBase64 EncodeJpeg EncodeJpegVariableQuality EncodePng EncodeWav EnsureShape Enter Equal Erf Erfc "
    "Erfinv EuclideanNorm Exit Exp ExpandDims ExperimentalAssertNextDataset ExperimentalAutoShardDataset "
    "ExperimentalBytesProducedStatsDataset ExperimentalChooseFastestDataset ExperimentalDatasetCardinality "
    "ExperimentalDenseToSparseBatchDataset ExperimentalDirectedInterleaveDataset "
    "ExperimentalGroupByWindowDataset ExperimentalIgnoreErrorsDataset ExperimentalLatencyStatsDataset "
    "ExperimentalMapAndBatchDataset ExperimentalMapDataset ExperimentalMaxIntraOpParallelismDataset "
    "ExperimentalNonSerializableDataset ExperimentalParallelInterleaveDataset "
    "ExperimentalParseExampleDataset ExperimentalPrivateThreadPoolDataset ExperimentalRebatchDataset "
    "ExperimentalScanDataset ExperimentalSlidingWindowDataset ExperimentalTakeWhileDataset "
    "ExperimentalUnbatchDataset ExperimentalUniqueDataset Expint Expm1 ExtractGlimpse ExtractGlimpseV2 "
    "ExtractImagePatches ExtractJpegShape ExtractVolumePatches FFT FFT2D FFT3D FFTND FakeParam "
    "FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars "
    "FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannel "
    "FakeQuantWithMinMaxVarsPerChannelGradient Fill FilterByLastComponentDataset FilterDataset "
    "FinalizeDataset Fingerprint FlatMapDataset Floor FloorDiv FloorMod For FractionalAvgPool "
    "FractionalAvgPoolGrad FractionalMaxPool FractionalMaxPoolGrad FresnelCos FresnelSin FusedBatchNorm "
    "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 "
    "FusedPadConv2D FusedResizeAndPadConv2D GRUBlockCell GRUBlockCellGrad Gather GatherNd GatherV2 "
    "GenerateBoundingBoxProposals GetElementAtIndex GetOptions Greater GreaterEqual GroupByWindowDataset "
    "HSVToRGB HistogramFixedWidth HistogramSummary HostConst IFFT IFFT2D IFFT3D IFFTND IRFFT IRFFT2D "
    "IRFFT3D IRFFTND Identity IdentityN Igamma IgammaGradA Igammac IgnoreErrorsDataset Imag "
    "ImageProjectiveTransformV2 ImageProjectiveTransformV3 ImageSummary InTopK InTopKV2 IndexFlatMapDataset "
    "InitializeTable InplaceAdd InplaceSub InplaceUpdate InterleaveDataset Inv InvGrad Invert "
    "InvertPermutation IsFinite IsInf IsNan IsVariableInitialized IsotonicRegression "
    "KMC2ChainInitialization KmeansPlusPlusInitialization KthOrderStatistic L2Loss LRN LRNGrad "
    "LSTMBlockCell LSTMBlockCellGrad LatencyStatsDataset LeakyRelu LeakyReluGrad LeftShift "
    "LegacyParallelInterleaveDatasetV2 Less LessEqual Lgamma LinSpace ListDiff Log Log1p "
    "LogMatrixDeterminant LogSoftmax LogicalAnd LogicalNot LogicalOr LookupTableExport LookupTableFind "
    "LookupTableImport LookupTableInsert LookupTableSize LoopCond LowerBound Lu MakeUnique "
    "MapAndBatchDataset MapDataset MapDefun MatMul MatrixBandPart MatrixDeterminant MatrixDiag "
    "MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 MatrixExponential "
    "MatrixInverse MatrixLogarithm MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MatrixSolve MatrixSolveLs "
    "MatrixSquareRoot MatrixTriangularSolve Max MaxIntraOpParallelismDataset MaxPool MaxPool3D "
    "MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad MaxPoolGradGradV2 "
    "MaxPoolGradGradWithArgmax MaxPoolGradV2 MaxPoolGradWithArgmax MaxPoolV2 MaxPoolWithArgmax Maximum Mean "
    "Merge MergeSummary Mfcc Min Minimum MirrorPad MirrorPadGrad Mod ModelDataset Mul MulNoNan Ndtri "
    "NearestNeighbors Neg NextAfter NextIteration NoOp NonMaxSuppression NonMaxSuppressionV2 "
    "NonMaxSuppressionV3 NonMaxSuppressionV4 NonMaxSuppressionV5 NonMaxSuppressionWithOverlaps "
    "NonSerializableDataset NotEqual NthElement OneHot OnesLike OptimizeDataset OptimizeDatasetV2 "
    "OptionalFromValue OptionalGetValue OptionalHasValue OptionalNone OptionsDataset Pack Pad PadV2 "
    "PaddedBatchDataset PaddedBatchDatasetV2 ParallelBatchDataset ParallelConcat ParallelDynamicStitch "
    "ParallelFilterDataset ParallelInterleaveDataset ParallelInterleaveDatasetV2 "
    "ParallelInterleaveDatasetV3 ParallelInterleaveDatasetV4 ParallelMapDataset ParallelMapDatasetV2 "
    "ParseExample ParseExampleDataset ParseExampleDatasetV2 ParseExampleV2 ParseSequenceExample "
    "ParseSequenceExampleV2 ParseSingleExample ParseSingleSequenceExample ParseTensor PartitionedCall "
    "Placeholder PlaceholderV2 PlaceholderWithDefault Polygamma PopulationCount Pow PrefetchDataset "
    "PreventGradient PrivateThreadPoolDataset Prod Qr QuantizeAndDequantize QuantizeAndDequantizeV2 "
    "QuantizeAndDequantizeV3 QuantizeAndDequantizeV4 QuantizeAndDequantizeV4Grad QuantizeDownAndShrinkRange "
    "QuantizeV2 QuantizedAdd QuantizedAvgPool QuantizedBatchNormWithGlobalNormalization QuantizedBiasAdd "
    "QuantizedConcat QuantizedConcatV2 QuantizedConv2D QuantizedConv2DAndRelu "
    "QuantizedConv2DAndReluAndRequantize QuantizedConv2DAndRequantize QuantizedConv2DPerChannel "
    "QuantizedConv2DWithBias QuantizedConv2DWithBiasAndRelu QuantizedConv2DWithBiasAndReluAndRequantize "
    "QuantizedConv2DWithBiasAndRequantize QuantizedConv2DWithBiasSignedSumAndReluAndRequantize "
    "QuantizedConv2DWithBiasSumAndRelu QuantizedConv2DWithBiasSumAndReluAndRequantize "
    "QuantizedDepthwiseConv2D QuantizedDepthwiseConv2DWithBias QuantizedDepthwiseConv2DWithBiasAndRelu "
    "QuantizedDepthwiseConv2DWithBiasAndReluAndRequantize QuantizedInstanceNorm QuantizedMatMul "
    "QuantizedMatMulWithBias QuantizedMatMulWithBiasAndDequantize QuantizedMatMulWithBiasAndRelu "
    "QuantizedMatMulWithBiasAndReluAndRequantize QuantizedMatMulWithBiasAndRequantize QuantizedMaxPool "
    "QuantizedMul QuantizedRelu QuantizedRelu6 QuantizedReluX QuantizedReshape QuantizedResizeBilinear "
    "QueueClose QueueDequeue QueueDequeueMany QueueDequeueUpTo QueueEnqueue QueueEnqueueMany QueueIsClosed "
    "QueueSize RFFT RFFT2D RFFT3D RFFTND RGBToHSV RaggedBincount RaggedCountSparseOutput RaggedCross "
    "RaggedFillEmptyRows RaggedFillEmptyRowsGrad RaggedGather RaggedRange RaggedTensorFromVariant "
    "RaggedTensorToSparse RaggedTensorToTensor RaggedTensorToVariant RaggedTensorToVariantGradient "
    "RandomGammaGrad RandomIndexShuffle Range Rank Real RealDiv RebatchDataset RebatchDatasetV2 Reciprocal "
    "ReciprocalGrad ReduceJoin RefEnter RefExit RefIdentity RefMerge RefNextIteration RefSelect RefSwitch "
    "RegexFullMatch RegexReplace Relu Relu6 Relu6Grad ReluGrad RepeatDataset RequantizationRange "
    "RequantizationRangePerChannel Requantize RequantizePerChannel Reshape ResizeArea ResizeBicubic "
    "ResizeBicubicGrad ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad "
    "Reverse ReverseSequence ReverseV2 RewriteDataset RightShift Rint Roll Round Rsqrt RsqrtGrad "
    "SamplingDataset ScalarSummary ScaleAndTranslate ScaleAndTranslateGrad ScanDataset ScatterAdd "
    "ScatterDiv ScatterMax ScatterMin ScatterMul ScatterNd ScatterNdAdd ScatterNdMax ScatterNdMin "
    "ScatterNdNonAliasingAdd ScatterNdSub ScatterNdUpdate ScatterSub ScatterUpdate SdcaFprint SdcaOptimizer "
    "SdcaOptimizerV2 SdcaShrinkL1 SegmentMax SegmentMaxV2 SegmentMean SegmentMin SegmentMinV2 SegmentProd "
    "SegmentProdV2 SegmentSum SegmentSumV2 Select SelectV2 SelfAdjointEig SelfAdjointEigV2 Selu SeluGrad "
    "SerializeManySparse SerializeSparse SerializeTensor SetSize Shape ShapeN ShardDataset ShardedFilename "
    "ShardedFilespec ShuffleAndRepeatDataset ShuffleDataset Sigmoid SigmoidGrad Sign Sin Sinh Size "
    "SkipDataset Slice SlidingWindowDataset Snapshot SobolSample Softmax SoftmaxCrossEntropyWithLogits "
    "Softplus SoftplusGrad Softsign SoftsignGrad SpaceToBatch SpaceToBatchND SpaceToDepth "
    "SparseAccumulatorApplyGradient SparseAccumulatorTakeGradient SparseAdd SparseAddGrad "
    "SparseApplyAdadelta SparseApplyAdagrad SparseApplyAdagradDA SparseApplyAdagradV2 "
    "SparseApplyCenteredRMSProp SparseApplyFtrl SparseApplyFtrlV2 SparseApplyMomentum "
    "SparseApplyProximalAdagrad SparseApplyProximalGradientDescent SparseApplyRMSProp SparseBincount "
    "SparseConcat SparseCountSparseOutput SparseCross SparseCrossHashed SparseCrossV2 SparseDenseCwiseAdd "
    "SparseDenseCwiseDiv SparseDenseCwiseMul SparseFillEmptyRows SparseFillEmptyRowsGrad SparseMatMul "
    "SparseMatrixAdd SparseMatrixMatMul SparseMatrixMul SparseMatrixNNZ SparseMatrixOrderingAMD "
    "SparseMatrixSoftmax SparseMatrixSoftmaxGrad SparseMatrixSparseCholesky SparseMatrixSparseMatMul "
    "SparseMatrixTranspose SparseMatrixZeros SparseReduceMax SparseReduceMaxSparse SparseReduceSum "
    "SparseReduceSumSparse SparseReorder SparseReshape SparseSegmentMean SparseSegmentMeanGrad "
    "SparseSegmentMeanGradV2 SparseSegmentMeanWithNumSegments SparseSegmentSqrtN SparseSegmentSqrtNGrad "
    "SparseSegmentSqrtNGradV2 SparseSegmentSqrtNWithNumSegments SparseSegmentSum SparseSegmentSumGrad "
    "SparseSegmentSumGradV2 SparseSegmentSumWithNumSegments SparseSlice SparseSliceGrad SparseSoftmax "
    "SparseSoftmaxCrossEntropyWithLogits SparseSparseMaximum SparseSparseMinimum SparseSplit "
    "SparseTensorDenseAdd SparseTensorDenseMatMul SparseTensorToCSRSparseMatrix SparseToDense "
    "SparseToSparseSetOperation Spence Split SplitV Sqrt SqrtGrad Square SquaredDifference Squeeze "
    "StackClose StackPop StackPush StatelessCase StatelessIf StatelessMultinomial "
    "StatelessParameterizedTruncatedNormal StatelessRandomBinomial StatelessRandomGammaV2 "
    "StatelessRandomGammaV3 StatelessRandomGetKeyCounter StatelessRandomGetKeyCounterAlg "
    "StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomPoisson StatelessRandomUniform "
    "StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 StatelessRandomUniformInt "
    "StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessSampleDistortedBoundingBox "
    "StatelessShuffle StatelessTruncatedNormal StatelessTruncatedNormalV2 StatelessWhile "
    "StaticRegexFullMatch StaticRegexReplace StochasticCastToInt StopGradient StridedSlice "
    "StridedSliceAssign StridedSliceGrad StringFormat StringJoin StringLength StringLower StringNGrams "
    "StringSplit StringSplitV2 StringStrip StringToHashBucket StringToHashBucketFast "
    "StringToHashBucketStrong StringToNumber StringUpper Sub Substr Sum Svd Switch SymbolicGradient "
    "TakeDataset TakeWhileDataset Tan Tanh TanhGrad TensorArrayClose TensorArrayCloseV2 TensorArrayConcat "
    "TensorArrayConcatV2 TensorArrayGather TensorArrayGatherV2 TensorArrayPack TensorArrayRead "
    "TensorArrayReadV2 TensorArrayScatter TensorArrayScatterV2 TensorArraySize TensorArraySizeV2 "
    "TensorArraySplit TensorArraySplitV2 TensorArrayUnpack TensorArrayWrite TensorArrayWriteV2 "
    "TensorListConcat TensorListConcatLists TensorListConcatV2 TensorListElementShape TensorListFromTensor "
    "TensorListGather TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack "
    "TensorListPushBackBatch TensorListReserve TensorListResize TensorListScatter "
    "TensorListScatterIntoExistingList TensorListScatterV2 TensorListSetItem TensorListSplit "
    "TensorListStack TensorMapErase TensorMapHasKey TensorMapInsert TensorMapLookup TensorMapSize "
    "TensorMapStackKeys TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub "
    "TensorScatterUpdate TensorStridedSliceUpdate TensorSummary TensorSummaryV2 Tile TileGrad ToBool TopK "
    "TopKUnique TopKV2 TopKWithUnique Transpose TridiagonalMatMul TridiagonalSolve TruncateDiv TruncateMod "
    "Unbatch UnbatchDataset UnbatchGrad UncompressElement UnicodeDecode UnicodeDecodeWithOffsets "
    "UnicodeEncode UnicodeScript UnicodeTranscode UniformDequantize UniformQuantize UniformQuantizedAdd "
    "UniformQuantizedClipByValue UniformQuantizedConvolution UniformQuantizedConvolutionHybrid "
    "UniformQuantizedDot UniformQuantizedDotHybrid UniformRequantize Unique UniqueDataset UniqueV2 "
    "UniqueWithCounts UniqueWithCountsV2 Unpack UnravelIndex UnsortedSegmentJoin UnsortedSegmentMax "
    "UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum UnwrapDatasetVariant UpperBound "
    "WeightedFlatMapDataset Where WindowDataset WindowOp WrapDatasetVariant Xdivy XlaBroadcastHelper "
    "XlaConv XlaConvV2 XlaDot XlaDotV2 XlaDynamicSlice XlaDynamicUpdateSlice XlaEinsum XlaGather "
    "XlaKeyValueSort XlaOptimizationBarrier XlaPad XlaReduce XlaReducePrecision XlaReduceWindow "
    "XlaRemoveDynamicDimensionSize XlaReplicaId XlaRngBitGenerator XlaScatter XlaSelectAndScatter "
    "XlaSelfAdjointEig XlaSetBound XlaSetDynamicDimensionSize XlaSharding XlaSort XlaSpmdFullToShardShape "
    "XlaSpmdShardToFullShape XlaSvd XlaVariadicReduce XlaVariadicReduceV2 XlaVariadicSort Xlog1py Xlogy "
    "ZerosLike Zeta ZipDataset _FusedBatchNormEx _FusedBatchNormGradEx _FusedConv2D _FusedConv3D "
    "_FusedDepthwiseConv2dNative _FusedMatMul _FusedQuantizedConv2D _FusedQuantizedDepthwiseConv2D"
)
STATELESS_OPERATIONS = frozenset(_STATELESS.split())
_STATEFUL = (
    "AddManySparseToTensorsMap AddSparseToTensorsMap AllCandidateSampler AnonymousHashTable "
    "AnonymousIterator AnonymousIteratorV2 AnonymousIteratorV3 AnonymousMemoryCache "
    "AnonymousMultiDeviceIterator AnonymousMultiDeviceIteratorV3 AnonymousMutableDenseHashTable "
    "AnonymousMutableHashTable AnonymousMutableHashTableOfTensors AnonymousRandomSeedGenerator "
    "AnonymousSeedGenerator Assert AssignAddVariableOp AssignSubVariableOp AssignVariableOp Barrier "
    "BoostedTreesCenterBias BoostedTreesCreateEnsemble BoostedTreesCreateQuantileStreamResource "
    "BoostedTreesDeserializeEnsemble BoostedTreesEnsembleResourceHandleOp BoostedTreesExampleDebugOutputs "
    "BoostedTreesFlushQuantileSummaries BoostedTreesGetEnsembleStates BoostedTreesPredict "
    "BoostedTreesQuantileStreamResourceAddSummaries BoostedTreesQuantileStreamResourceDeserialize "
    "BoostedTreesQuantileStreamResourceFlush BoostedTreesQuantileStreamResourceGetBucketBoundaries "
    "BoostedTreesQuantileStreamResourceHandleOp BoostedTreesSerializeEnsemble BoostedTreesTrainingPredict "
    "BoostedTreesUpdateEnsemble BoostedTreesUpdateEnsembleV2 Case CheckNumerics CheckNumericsV2 "
    "ConditionalAccumulator ConsumeMutexLock CudnnRNN CudnnRNNBackprop CudnnRNNBackpropV2 "
    "CudnnRNNBackpropV3 CudnnRNNV2 CudnnRNNV3 DatasetToSingleElement DeepCopy DeleteIterator "
    "DeleteMemoryCache DeleteMultiDeviceIterator DeleteRandomSeedGenerator DeleteSeedGenerator "
    "DestroyResourceOp DeviceIndex DisableCopyOnRead DtypeWithDefaultOp DummyIterationCounter "
    "DummyMemoryCache DummySeedGenerator Empty ExperimentalGroupByReducerDataset "
    "ExperimentalIteratorGetDevice ExperimentalRandomDataset ExperimentalSetStatsAggregatorDataset "
    "ExperimentalStatsAggregatorHandle ExperimentalStatsAggregatorSummary ExperimentalThreadPoolDataset "
    "ExperimentalThreadPoolHandle FIFOQueue FIFOQueueV2 FakeQueue GeneratorDataset GlobalShuffleDataset "
    "GroupByReducerDataset GuaranteeConst HashTable HashTableV2 If InitializeTableFromDataset "
    "InitializeTableV2 IsBoostedTreesEnsembleInitialized IsBoostedTreesQuantileStreamResourceInitialized "
    "IsTensorFloat32Enabled Iterator IteratorFromStringHandle IteratorFromStringHandleV2 IteratorGetDevice "
    "IteratorGetNext IteratorGetNextAsOptional IteratorGetNextSync IteratorToStringHandle IteratorV2 "
    "LearnedUnigramCandidateSampler ListDataset LogUniformCandidateSampler LookupTableExportV2 "
    "LookupTableFindV2 LookupTableImportV2 LookupTableInsertV2 LookupTableRemoveV2 LookupTableSizeV2 "
    "MakeIterator MapClear MapIncompleteSize MapPeek MapSize MapStage MapUnstage MapUnstageNoKey "
    "MultiDeviceIterator MultiDeviceIteratorFromStringHandle MultiDeviceIteratorGetNextFromShard "
    "MultiDeviceIteratorInit MultiDeviceIteratorToStringHandle Multinomial MutableDenseHashTable "
    "MutableDenseHashTableV2 MutableHashTable MutableHashTableOfTensors MutableHashTableOfTensorsV2 "
    "MutableHashTableV2 MutexLock MutexV2 NegTrain NonDeterministicInts OneShotIterator OrderedMapClear "
    "OrderedMapIncompleteSize OrderedMapPeek OrderedMapSize OrderedMapStage OrderedMapUnstage "
    "OrderedMapUnstageNoKey PaddingFIFOQueue PaddingFIFOQueueV2 ParameterizedTruncatedNormal Print "
    "PriorityQueue PriorityQueueV2 QueueCloseV2 QueueDequeueManyV2 QueueDequeueUpToV2 QueueDequeueV2 "
    "QueueEnqueueManyV2 QueueEnqueueV2 QueueIsClosedV2 QueueSizeV2 RandomCrop RandomDataset RandomDatasetV2 "
    "RandomGamma RandomPoisson RandomPoissonV2 RandomShuffle RandomShuffleQueue RandomShuffleQueueV2 "
    "RandomStandardNormal RandomUniform RandomUniformInt RangeDataset ReadVariableOp ReduceDataset "
    "ResourceAccumulatorApplyGradient ResourceAccumulatorNumAccumulated ResourceAccumulatorSetGlobalStep "
    "ResourceAccumulatorTakeGradient ResourceApplyAdaMax ResourceApplyAdadelta ResourceApplyAdagrad "
    "ResourceApplyAdagradDA ResourceApplyAdagradV2 ResourceApplyAdam ResourceApplyAdamWithAmsgrad "
    "ResourceApplyAddSign ResourceApplyCenteredRMSProp ResourceApplyFtrl ResourceApplyFtrlV2 "
    "ResourceApplyGradientDescent ResourceApplyKerasMomentum ResourceApplyMomentum ResourceApplyPowerSign "
    "ResourceApplyProximalAdagrad ResourceApplyProximalGradientDescent ResourceApplyRMSProp "
    "ResourceConditionalAccumulator ResourceCountUpTo ResourceGather ResourceGatherNd ResourceScatterAdd "
    "ResourceScatterDiv ResourceScatterMax ResourceScatterMin ResourceScatterMul ResourceScatterNdAdd "
    "ResourceScatterNdMax ResourceScatterNdMin ResourceScatterNdSub ResourceScatterNdUpdate "
    "ResourceScatterSub ResourceScatterUpdate ResourceSparseApplyAdadelta ResourceSparseApplyAdagrad "
    "ResourceSparseApplyAdagradDA ResourceSparseApplyAdagradV2 ResourceSparseApplyCenteredRMSProp "
    "ResourceSparseApplyFtrl ResourceSparseApplyFtrlV2 ResourceSparseApplyKerasMomentum "
    "ResourceSparseApplyMomentum ResourceSparseApplyProximalAdagrad "
    "ResourceSparseApplyProximalGradientDescent ResourceSparseApplyRMSProp ResourceStridedSliceAssign "
    "RngReadAndSkip RngSkip SampleDistortedBoundingBox SampleDistortedBoundingBoxV2 SerializeIterator "
    "SetStatsAggregatorDataset ShuffleAndRepeatDatasetV2 ShuffleDatasetV2 ShuffleDatasetV3 "
    "SparseConditionalAccumulator SparseTensorSliceDataset Stack StackCloseV2 StackPopV2 StackPushV2 "
    "StackV2 Stage StageClear StagePeek StageSize StatefulPartitionedCall StatefulRandomBinomial "
    "StatefulStandardNormal StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform "
    "StatefulUniformFullInt StatefulUniformInt StatelessRandomGetAlg StatsAggregatorHandle "
    "StatsAggregatorHandleV2 StatsAggregatorSummary SyncDevice TakeManySparseFromTensorsMap "
    "TemporaryVariable TensorArray TensorArrayCloseV3 TensorArrayConcatV3 TensorArrayGatherV3 "
    "TensorArrayGrad TensorArrayGradV2 TensorArrayGradV3 TensorArrayGradWithShape TensorArrayReadV3 "
    "TensorArrayScatterV3 TensorArraySizeV3 TensorArraySplitV3 TensorArrayV2 TensorArrayV3 "
    "TensorArrayWriteV3 TensorDataset TensorSliceDataset ThreadPoolDataset ThreadPoolHandle "
    "ThreadUnsafeUnigramCandidateSampler Timestamp TruncatedNormal UniformCandidateSampler Unstage "
    "VarHandleOp VarIsInitializedOp Variable VariableShape VariableV2 While XlaDequantize XlaIf XlaWhile"
)
STATEFUL_OPERATIONS = frozenset(_STATEFUL.split())
# The operations above with functions as attributes.
_CALLING = (
    "BatchFunction Case ChooseFastestBranchDataset ExperimentalGroupByReducerDataset "
    "ExperimentalGroupByWindowDataset ExperimentalMapAndBatchDataset ExperimentalMapDataset "
    "ExperimentalParallelInterleaveDataset ExperimentalScanDataset ExperimentalTakeWhileDataset "
    "FilterDataset FlatMapDataset For GeneratorDataset GroupByReducerDataset GroupByWindowDataset If "
    "IndexFlatMapDataset InterleaveDataset LegacyParallelInterleaveDatasetV2 MapAndBatchDataset MapDataset "
    "MapDefun OneShotIterator ParallelFilterDataset ParallelInterleaveDataset ParallelInterleaveDatasetV2 "
    "ParallelInterleaveDatasetV3 ParallelInterleaveDatasetV4 ParallelMapDataset ParallelMapDatasetV2 "
    "PartitionedCall ReduceDataset ScanDataset StatefulPartitionedCall StatelessCase StatelessIf "
    "StatelessWhile SymbolicGradient TakeWhileDataset While XlaIf XlaReduce XlaReduceWindow XlaScatter "
    "XlaSelectAndScatter XlaVariadicReduce XlaVariadicReduceV2 XlaVariadicSort XlaWhile"
)
CALLING_OPERATIONS = frozenset(_CALLING.split())
PURE_OPERATIONS = STATELESS_OPERATIONS | STATEFUL_OPERATIONS

# In TensorFlow before 2.5 (tensorflow/core/ops/tensor_forest_ops.cc), in memory only.
_OLDER = (
    "TensorForestCreateTreeVariable TensorForestTreeDeserialize TensorForestTreeIsInitializedOp "
    "TensorForestTreePredict TensorForestTreeResourceHandleOp TensorForestTreeSerialize TensorForestTreeSize"
)
OLDER_OPERATIONS = frozenset(_OLDER.split())

# Operations of the saver (tensorflow/core/ops/io_ops.cc), with their inputs that are paths.
SAVER_OPERATIONS: Mapping[str, tuple[int, ...]] = {
    "Save": (0,),
    "SaveSlices": (0,),
    "SaveV2": (0,),
    "Restore": (0,),
    "RestoreSlice": (0,),
    "RestoreV2": (0,),
    "MergeV2Checkpoints": (0, 1),
}
# Tables from text files (tensorflow/core/ops/lookup_ops.cc): the path is the second input.
TABLE_OPERATIONS = frozenset(("InitializeTableFromTextFile", "InitializeTableFromTextFileV2"))
# Caches in memory if the path, the second input, is empty (tensorflow/core/ops/dataset_ops.cc).
CACHE_OPERATIONS = frozenset(("CacheDataset", "CacheDatasetV2"))
# Operations that touch no file with these values of an attribute, of which the default is one: streams of the
# process (logging_ops.cc), no vocabulary (candidate_sampling_ops.cc), descriptors in the attribute itself
# (decode_proto_ops.cc).
ATTRIBUTE_OPERATIONS: Mapping[str, tuple[str, re.Pattern[bytes]]] = {
    "PrintV2": ("output_stream", deferred.compile(rb"stdout|stderr|log\((info|warning|error)\)")),
    "FixedUnigramCandidateSampler": ("vocab_file", deferred.compile(rb"")),
    "DecodeProtoV2": ("descriptor_source", deferred.compile(rb"(local://|bytes://.*)?", re.DOTALL)),
    "EncodeProto": ("descriptor_source", deferred.compile(rb"(local://|bytes://.*)?", re.DOTALL)),
}

_UNKNOWN = "not a known pure operation"
# A call whose inputs are the arguments of its function; others pass them in another order.
_CALLS = frozenset((b"PartitionedCall", b"StatefulPartitionedCall"))
_PURE = frozenset(name.encode() for name in PURE_OPERATIONS | OLDER_OPERATIONS)
_CALLERS = frozenset(name.encode() for name in CALLING_OPERATIONS)
_DEPTH = 4  # graphs within graphs
_OPERATION_NAME = deferred.compile(rb"[A-Za-z_][\w.>/\\-]*")
# tensorflow/python/checkpoint/functional_saver.py and tensorflow/python/training/saver.py: the functions, the
# part of a path that they append, and the path unless a loader feeds another one.
_TRACED = deferred.compile(rb"__inference__traced_(save|restore)_\d+")
_SUFFIX = deferred.compile(rb"_temp(_[0-9a-f]{32})?/part|\.part")
_DEFAULTS = frozenset((b"", b"model"))
_TEXT = 7  # types.proto, DT_STRING

# Fields of MetaGraphDef (meta_graph.proto), GraphDef (graph.proto), FunctionDefLibrary and FunctionDef
# (function.proto), NodeDef (node_def.proto), AttrValue (attr_value.proto).
_MESSAGE = protobuf.DELIMITED
_META_GRAPH = dict.fromkeys(range(1, 8), _MESSAGE)
_FIRST, _TWO = {1: _MESSAGE}, {1: _MESSAGE, 2: _MESSAGE}
_OPERATION = {2: _MESSAGE}
_NODE = protobuf.Message({1: protobuf.BINARY, 2: protobuf.BINARY, 3: protobuf.BINARIES})
_LIST, _FUNCTION_VALUE, _TENSOR, _STRING = 1, 10, 8, 2
_VALUE = {1: _MESSAGE, 2: _MESSAGE, 8: _MESSAGE, 9: _MESSAGE, 10: _MESSAGE}
_VALUES = {2: _MESSAGE, 8: _MESSAGE, 9: _MESSAGE}


def audit_saved_model(data: memoryview, where: str, folder: str) -> tuple[CodeReference, ...]:
    """Return the operations in the graphs of a SavedModel that do more than compute.

    Raise CkpttoolError if a part that may contain an operation cannot be decoded.
    """
    return merge_references(*(_Audit(meta, where, folder).run() for meta in _submessages(data, 2)))


def audit_graph(data: memoryview, where: str) -> tuple[CodeReference, ...] | None:
    """Return the operations of a file with a GraphDef, MetaGraphDef or SavedModel that do more than compute.

    Return None if the bytes are none of these.
    """
    findings = []
    for form in (_GRAPH_DEF, _META_GRAPH_DEF, _SAVED_MODEL):
        try:
            audits = [_Audit(meta, where, None, bare=form == _GRAPH_DEF) for meta in _meta_graphs(data, form)]
            if any(audit.is_graph for audit in audits):
                findings.append(merge_references(*(audit.run() for audit in audits)))
        except CkpttoolError:
            continue  # bytes of another message
    return merge_references(*findings) if findings else None


_GRAPH_DEF, _META_GRAPH_DEF, _SAVED_MODEL = "GraphDef", "MetaGraphDef", "SavedModel"


def _meta_graphs(data: memoryview, form: str) -> Iterator[memoryview]:
    """Yield the MetaGraphDefs in bytes of this message; a GraphDef alone becomes one."""
    if form == _SAVED_MODEL:
        yield from _submessages(data, 2)
    else:
        yield data if form == _META_GRAPH_DEF else memoryview(protobuf.encode_message(2, bytes(data)))


def _submessages(data: memoryview, number: int) -> Iterator[memoryview]:
    for _, value in _fields(data, {number: _MESSAGE}):
        yield protobuf.as_message(value)


def _last(data: memoryview, number: int) -> bytes:
    """Return a string field, of which the last occurrence counts."""
    last = memoryview(b"")
    for value in _submessages(data, number):
        last = value
    return bytes(last)


def _fields(data: memoryview, schema: protobuf.Schema) -> Iterable[tuple[int, int | memoryview]]:
    # A list of fields is faster, a message of many fields is not to be one.
    many = len(data) > _SMALL
    return protobuf.iter_fields(data, schema) if many else protobuf.parse_fields(data, schema)


_SMALL = 4096


class _PathError(Exception):
    """The reason why a path is not one that the model's own loader sets."""


class _Node(NamedTuple):
    """A NodeDef: its operation, its inputs and its bytes."""

    op: bytes
    inputs: tuple[bytes, ...]
    data: memoryview

    @property
    def values(self) -> tuple[bytes, ...]:
        """The nodes of the inputs that are tensors."""
        return tuple(node_name(input_) for input_ in self.inputs if not input_.startswith(b"^"))


class _NodeLocation(NamedTuple):
    """A node of a function, or of the graph itself (b"")."""

    function: bytes
    node: bytes


def _parse_node(data: memoryview) -> tuple[bytes, _Node]:
    name, op, inputs = protobuf.decode(data, _NODE)
    return name, _Node(op, tuple(inputs), data)


def _attributes(node: memoryview) -> Iterator[tuple[bytes, list[tuple[int, memoryview]]]]:
    """Yield the attributes of a node: name, and the fields of the value that hold bytes."""
    for attribute in _submessages(node, 5):
        yield _map_entry(attribute)


def _map_entry(entry: memoryview) -> tuple[bytes, list[tuple[int, memoryview]]]:
    name, values = b"", []
    for number, value in protobuf.parse_fields(entry, _TWO):
        content = protobuf.as_message(value)
        if number == 1:
            name = bytes(content)
        else:
            values += [(at, protobuf.as_message(row)) for at, row in protobuf.parse_fields(content, _VALUE)]
    return name, values


def _referenced_functions(node: memoryview) -> Iterator[bytes]:
    """Yield the names of functions in the attributes of a node, and in the attributes of those names."""
    waiting = [value for _, values in _attributes(node) for value in values]
    while waiting:
        number, value = waiting.pop()
        if number == _LIST:
            waiting += [
                (_FUNCTION_VALUE, protobuf.as_message(item))
                for at, item in protobuf.parse_fields(value, _VALUES)
                if at == 9
            ]
        elif number == _FUNCTION_VALUE:  # NameAttrList: name, attr
            for at, item in protobuf.parse_fields(value, _TWO):
                content = protobuf.as_message(item)
                if at == 1:
                    yield bytes(content)
                else:
                    waiting += _map_entry(content)[1]


def _tensors(node: memoryview) -> Iterator[memoryview]:
    """Yield the value of a constant (TensorProto)."""
    for name, values in _attributes(node):
        yield from (value for number, value in values if name == b"value" and number == _TENSOR)


def _strings(node: memoryview) -> Iterator[bytes]:
    """Yield the strings of a constant (TensorProto.string_val, 8)."""
    for tensor in _tensors(node):
        yield from map(bytes, _submessages(tensor, 8))


def _only_string(node: _Node | None) -> bytes | None:
    """Return the string of a constant that has exactly one; None for anything else."""
    if node is None or node.op != b"Const":
        return None
    if any(True for tensor in _tensors(node.data) for _ in _submessages(tensor, 4)):
        return None  # TensorProto.tensor_content, which replaces the strings (framework/tensor.cc, FromProto)
    texts = [*itertools.islice(_strings(node.data), 2)]
    return texts[0] if len(texts) == 1 else None


@dataclass(slots=True)
class _Parts:
    """The parts of a MetaGraphDef as undecoded messages; collections by name."""

    graphs: list[memoryview] = field(default_factory=list)
    savers: list[memoryview] = field(default_factory=list)
    signatures: list[tuple[bytes, memoryview]] = field(default_factory=list)
    collections: list[tuple[bytes, int, memoryview]] = field(default_factory=list)
    assets: list[memoryview] = field(default_factory=list)
    objects: list[memoryview] = field(default_factory=list)


def _split(meta: memoryview, meter: FieldMeter) -> _Parts:
    parts = _Parts()
    for number, value in _fields(meta, _META_GRAPH):
        content = protobuf.as_message(value)
        meter.keep()
        if number == 4:
            name = _last(content, 1)
            for kind, listed in _collection_values(content):
                meter.keep()
                parts.collections.append((name, kind, listed))
        elif number == 5:
            name = _last(content, 1)
            parts.signatures += [(name, submessage) for submessage in _submessages(content, 2)]
        elif number in (2, 3, 6, 7):
            own = {2: parts.graphs, 3: parts.savers, 6: parts.assets, 7: parts.objects}
            own[number].append(content)
    parts.savers += [value for name, kind, value in parts.collections if name == b"savers" and kind == 2]
    return parts


def _collection_values(entry: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the names (1), messages (2) and typed messages (5) of a collection, with this kind."""
    for definition in _submessages(entry, 2):
        for kind, listed in protobuf.parse_fields(definition, dict.fromkeys((1, 2, 5), _MESSAGE)):
            for value in _submessages(protobuf.as_message(listed), 1):
                yield kind, value


class _Audit:
    """Audit of one MetaGraphDef.

    `folder` is the SavedModel's, None for a graph without one; a `bare` GraphDef names no saver.
    """

    def __init__(
        self, meta: memoryview, where: str, folder: str | None, *, bare: bool = False, depth: int = 0
    ) -> None:
        self._meter = FieldMeter()
        self.parts = _split(meta, self._meter)
        self.bare = bare
        self.nodes = 0
        self.functions: dict[bytes, list[memoryview]] = {}
        self.folder = folder
        self._where = where
        self._depth = depth
        self._operations: dict[str, CodeReference] = {}
        # Nodes with operations that are not in the list, that call functions, and that create variables.
        self.others: list[tuple[_NodeLocation, _Node]] = []
        self.callers: list[tuple[bytes, memoryview]] = []
        self.handles: list[tuple[bytes, memoryview]] = []
        for graph in self.parts.graphs:
            self._survey(graph)

    def _survey(self, graph: memoryview) -> None:
        for number, value in _fields(graph, _TWO):
            content = protobuf.as_message(value)
            if number == 1:
                self._look(b"", content)
                continue
            for function in _submessages(content, 1):
                name = b""
                for signature in _submessages(function, 1):
                    name = _last(signature, 1) or name
                self._meter.keep()
                self.functions.setdefault(name, []).append(function)
                for node in _submessages(function, 3):
                    self._look(name, node)

    def _look(self, function: bytes, node: memoryview) -> None:
        for _, value in protobuf.parse_fields(bytes(node), _OPERATION):
            op = protobuf.as_message(value)
            self.nodes += 1
            if op in _CALLERS:
                self._meter.keep()
                self.callers.append((function, node))
            elif op not in _PURE:
                self._meter.keep()
                name, parsed = _parse_node(node)
                self.others.append((_NodeLocation(function, name), parsed._replace(op=op)))
            elif op == b"VarHandleOp":
                self._meter.keep()
                self.handles.append((function, node))

    @cached_property
    def references(self) -> list[tuple[bytes, memoryview, list[bytes]]]:
        """The nodes that call functions, each after its own function and before those that it names."""
        return [(location, node, [*_referenced_functions(node)]) for location, node in self.callers]

    def iter_nodes(self, function: bytes) -> Iterator[memoryview]:
        """Yield the nodes of a function, or of the graph itself (b"")."""
        for graph in () if function else self.parts.graphs:
            yield from _submessages(graph, 1)
        for definition in self.functions.get(function, ()) if function else ():
            yield from _submessages(definition, 3)

    def run(self) -> tuple[CodeReference, ...]:
        """Return the findings, one per operation."""
        paths = _Paths(self)
        for function, _, names in self.references:
            for name in names:
                if name and name not in self.functions and name not in _PURE:
                    self._add(name, function, "function that the graph does not contain")
        for location, other in self.others:
            reason = None if other.op in self.functions else self._judge(location, other, paths)
            if reason is not None:
                self._add(other.op, location.function, reason)
        packed = self._packed_constants() if self._operations else ()
        return merge_references(self._operations.values(), packed, *self._collections())

    def _judge(self, location: _NodeLocation, node: _Node, paths: _Paths) -> str | None:
        """Return why an operation that is not on the list does more than compute; None if it does not."""
        op = node.op.decode("utf-8", "surrogateescape")
        try:
            if op in SAVER_OPERATIONS:
                paths.require_saver(location, node, SAVER_OPERATIONS[op])
            elif op in TABLE_OPERATIONS:
                paths.require_asset(location, node)
            elif op in CACHE_OPERATIONS:
                paths.require_empty(location, node)
            elif op in ATTRIBUTE_OPERATIONS:
                _require_attribute(node, *ATTRIBUTE_OPERATIONS[op])
            else:
                return _UNKNOWN
        except _PathError as error:
            return str(error)
        return None

    def _add(self, name: bytes, function: bytes, reason: str) -> None:
        shown = name.decode("utf-8", "surrogateescape")
        known = self._operations.get(shown)
        if known is not None:
            self._operations[shown] = CodeReference(
                shown, CODE, known.calls + 1, None, known.where, "tensorflow"
            )
            return
        inner = f", function {function.decode('utf-8', 'surrogateescape')}" if function else ""
        self._operations[shown] = CodeReference(
            shown, CODE, 1, None, f"{self._where}{inner}: {reason}", "tensorflow"
        )

    def _packed_constants(self) -> tuple[CodeReference, ...]:
        """Return the operations in graphs that constants contain as strings, which others may decode."""
        nodes = (_parse_node(data) for name in (b"", *self.functions) for data in self.iter_nodes(name))
        texts = (text for _, node in nodes if node.op == b"Const" for text in _strings(node.data))
        return merge_references(*(self._packed(text, "a constant") for text in texts))

    def _collections(self) -> Iterator[tuple[CodeReference, ...]]:
        for name, kind, value in self.parts.collections:
            if kind == 1:
                continue
            content = bytes(value)
            if kind == 5:  # google.protobuf.Any: type_url, value
                content = b"".join(bytes(submessage) for submessage in _submessages(value, 2))
            where = f"collection {name.decode('utf-8', 'surrogateescape')}"
            yield self._packed(content, where)
            if content[:1] == b"\x80":
                scan, _ = scan_head(lambda _, whole=content: whole, len(content), len(content))  # type: ignore[misc]
                acting = [reference for reference in scan.code_references if reference.verdict == CODE]
                yield relocate_references(acting, f"{self._where}, {where}")

    def _packed(self, content: bytes, where: str) -> tuple[CodeReference, ...]:
        """Return the operations of a graph inside a string; nothing if it is no graph."""
        findings = []
        for form in (_GRAPH_DEF, _META_GRAPH_DEF) if self._depth < _DEPTH else ():
            try:
                for meta in _meta_graphs(memoryview(content), form):
                    location = f"{self._where}, {where}"
                    audit = _Audit(meta, location, None, bare=form == _GRAPH_DEF, depth=self._depth + 1)
                    findings += [audit.run()] if audit.is_graph else []
            except CkpttoolError:
                continue  # most strings are not graphs
        return merge_references(*findings)

    @property
    def is_graph(self) -> bool:
        """Whether the bytes are a graph, rather than another message: an operation has a valid name."""
        return self.nodes > len(self.others) or any(
            _OPERATION_NAME.fullmatch(node.op) for _, node in self.others
        )


def _require_attribute(node: _Node, name: str, allowed: re.Pattern[bytes]) -> None:
    for attribute, values in _attributes(node.data):
        if attribute == name.encode():
            for number, value in values:
                if number != _STRING or not allowed.fullmatch(value):
                    raise _PathError(f"its {name} may name a file")


class _Paths:
    """The origins of the paths in a graph: the saver's file name, the model's assets, or others."""

    def __init__(self, audit: _Audit) -> None:
        self._audit = audit
        self._bodies: dict[bytes, dict[bytes, _Node]] = {}
        self._meter = FieldMeter()

    # The graph by name, parsed only if an operation has a path.

    def body(self, function: bytes) -> dict[bytes, _Node]:
        """Return the nodes of a function, or of the graph itself (b""), by name."""
        if function not in self._bodies:
            body = self._bodies[function] = {}
            for data in self._audit.iter_nodes(function):
                name, node = _parse_node(data)
                self._meter.keep(1 + len(node.inputs))
                body[name] = node
        return self._bodies[function]

    def arguments(self, function: bytes) -> list[bytes]:
        """Return the names of a function's arguments: signature (1), its input_arg (2), their name (1)."""
        return [
            _last(argument, 1)
            for definition in self._audit.functions.get(function, ())[-1:]
            for signature in _submessages(definition, 1)
            for argument in _submessages(signature, 2)
        ]

    def calls(self, function: bytes) -> list[tuple[_NodeLocation, _Node]]:
        """Return the nodes that name a function."""
        calls = [(location, node) for location, node in self._audit.others if node.op == function]
        for caller, data, names in self._audit.references:
            if function in names:
                name, node = _parse_node(data)
                calls.append((_NodeLocation(caller, name), node))
        return calls

    @cached_property
    def concrete(self) -> dict[bytes, list[int]]:
        """The functions that objects of the model offer, with the objects bound to their last arguments."""
        functions: dict[bytes, list[int]] = {}
        for objects in self._audit.parts.objects:
            for entry in _submessages(objects, 2):
                name = _last(entry, 1)
                functions.setdefault(name, [])
                for function in _submessages(entry, 2):
                    for _, value in protobuf.parse_fields(function, {2: protobuf.NUMBERS}):
                        functions[name] += map(protobuf.as_int32, protobuf.as_ints(value))
        return functions

    @cached_property
    def assets(self) -> dict[bytes, list[str]]:
        """The file names of the assets, by the node that contains the path."""
        typed = (
            submessage
            for name, kind, value in self._audit.parts.collections
            if (name, kind) == (b"saved_model_assets", 5)
            for submessage in _submessages(value, 2)
        )
        assets: dict[bytes, list[str]] = {}
        for asset in (*self._audit.parts.assets, *typed):
            tensors = (bytes(name) for info in _submessages(asset, 1) for name in _submessages(info, 1))
            names = [protobuf.as_text(name) for name in _submessages(asset, 2)]
            for tensor in tensors:
                assets.setdefault(node_name(tensor), []).extend(names)
        return assets

    @cached_property
    def asset_objects(self) -> frozenset[int]:
        """The numbers of the objects that are assets (SavedObject.asset, 5, its asset_file_def_index, 1)."""
        declared = [[protobuf.as_text(name) for name in _submessages(a, 2)] for a in self._audit.parts.assets]
        asset_numbers = set()
        for objects in self._audit.parts.objects:
            for at, submessage in enumerate(_submessages(objects, 1)):
                kinds = protobuf.parse_fields(submessage, dict.fromkeys((*range(4, 11), 12), _MESSAGE))
                if not kinds or kinds[-1][0] != 5:
                    continue
                numbers = protobuf.parse_fields(protobuf.as_message(kinds[-1][1]), {1: protobuf.NUMBER})
                index = protobuf.as_int32(numbers[-1][1]) if numbers else 0
                if 0 <= index < len(declared):
                    self._require_inside(declared[index])
                    asset_numbers.add(at)
        return frozenset(asset_numbers)

    # What the signatures and the initialization run.

    @cached_property
    def fed(self) -> frozenset[bytes]:
        """The nodes that are inputs of signatures."""
        return frozenset(self._signature_nodes(1, initializers=True))

    @cached_property
    def served(self) -> frozenset[bytes]:
        """The nodes that the outputs of signatures need."""
        return self._needed(self._signature_nodes(2, initializers=False))

    @cached_property
    def initialized(self) -> frozenset[bytes]:
        """The nodes that a loader runs besides the saver's."""
        names = (b"saved_model_main_op", b"legacy_init_op", b"saved_model_train_op")
        listed = (node_name(bytes(v)) for name, _, v in self._audit.parts.collections if name in names)
        return self._needed([*listed, *self._signature_nodes(2, initializers=True)])

    @cached_property
    def saved(self) -> frozenset[bytes]:
        """The nodes that saving and restoring need (SaverDef: save_tensor_name, 2, restore_op_name, 3)."""
        savers = self._audit.parts.savers
        return self._needed(node_name(bytes(n)) for s in savers for at in (2, 3) for n in _submessages(s, at))

    @cached_property
    def filenames(self) -> frozenset[bytes]:
        """The nodes of the saver's file name (SaverDef: filename_tensor_name, 1)."""
        savers = self._audit.parts.savers
        return frozenset(node_name(bytes(n)) for saver in savers for n in _submessages(saver, 1))

    def _signature_nodes(self, side: int, *, initializers: bool) -> Iterator[bytes]:
        """Yield the nodes of the tensors of all signatures; `side` is 1 for inputs, 2 for outputs."""
        for name, signature in self._audit.parts.signatures:
            if initializers or not name.startswith(b"__saved_model_"):
                for entry in _submessages(signature, side):
                    for info in _submessages(entry, 2):
                        yield from map(node_name, _tensor_names(info))

    def _needed(self, names: Iterable[bytes]) -> frozenset[bytes]:
        """Return these nodes and all that they depend on."""
        graph, needed = self.body(b""), set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting += map(node_name, graph[name].inputs if name in graph else ())
        return frozenset(needed)

    # Requirements; each raises _PathError with the reason if it is not met.

    def require_saver(self, location: _NodeLocation, node: _Node, paths: tuple[int, ...]) -> None:
        """Require that the paths are the saver's file name, in its own nodes or functions."""
        inputs = [self._input(node, at) for at in paths]
        if not location.function:
            self._require_saver_node(location.node)
            self._require_file_names(inputs, location.node)
            return
        if not _TRACED.fullmatch(location.function) or location.function in self.concrete:
            raise _PathError("outside the functions that save and restore the variables")
        ends = [end for input_ in inputs for end in self._trace(location.function, input_, joins=True)]
        numbers = {self._argument(end) for end in ends}
        for caller, call in self.calls(location.function):
            if caller.function or call.op not in _CALLS or caller.node not in self.saved:
                raise _PathError("called by another node than the saver's")
            self._require_saver_node(caller.node)
            self._require_file_names([self._input(call, number) for number in numbers], caller.node)

    def _require_saver_node(self, name: bytes) -> None:
        if name in self.served or name in self.initialized:
            raise _PathError("run by a signature or by the initialization")

    def _require_file_names(self, inputs: Iterable[bytes], saver: bytes) -> None:
        for input_ in inputs:
            for _, name in self._trace(b"", input_, joins=True):
                self._require_file_name(name, saver)

    def _require_file_name(self, name: bytes, saver: bytes) -> None:
        """Require a node that a loader sets, of a saver or (older ones stay in the graph) in its scope."""
        scope, _, own = name.rpartition(b"/")
        left = saver.rpartition(b"/")[0] == scope and own in (b"Const", b"filename")
        if name not in self.filenames and not left and not self._audit.bare:
            raise _PathError("the path is not the saver's file name")
        if name in self.fed:
            raise _PathError("the path is an input of a signature")
        visited: set[bytes] = set()
        while (node := self.body(b"").get(name)) is not None and node.op == b"PlaceholderWithDefault":
            if name in visited:
                break
            visited.add(name)
            name = self._input(node, 0)
        if node is None or node.op not in (b"Placeholder", b"Const"):
            raise _PathError("the path is computed")
        if node.op == b"Const" and _only_string(node) not in _DEFAULTS:
            raise _PathError("the path is a constant")

    def require_empty(self, location: _NodeLocation, node: _Node) -> None:
        """Require that the second input is the empty string."""
        for function, name in self._trace(location.function, self._input(node, 1)):
            if _only_string(self.body(function).get(name)) != b"":
                raise _PathError("the path is not empty")

    def require_asset(self, location: _NodeLocation, node: _Node) -> None:
        """Require that the second input is the path of an asset of the model."""
        self._require_asset(location, self._input(node, 1), set())

    def _require_asset(
        self, location: _NodeLocation, tensor: bytes, visited: set[tuple[_NodeLocation, bytes]]
    ) -> None:
        if (location, tensor) in visited:
            return
        visited.add((location, tensor))
        if not location.function and location.node in self.served:
            raise _PathError("run by a signature, for which no asset is set")
        for end in self._trace(location.function, tensor):
            if not end.function:
                self._require_asset_node(end.node)
                continue
            number = self._argument(end)
            for caller, call in self.calls(end.function):
                if call.op not in _CALLS and call.op != end.function:
                    raise _PathError(f"the path passes through {call.op.decode('utf-8', 'surrogateescape')}")
                self._require_asset(caller, self._input(call, number), visited)
            if end.function in self.concrete:
                bound = self.concrete[end.function]
                at = number - (len(self.arguments(end.function)) - len(bound))
                if not 0 <= at < len(bound) or bound[at] not in self.asset_objects:
                    raise _PathError("the path is no asset of the model")

    def _require_asset_node(self, name: bytes) -> None:
        if name in self.assets:
            self._require_inside(self.assets[name])
            return
        node = self.body(b"").get(name)
        if node is None or node.op != b"ReadVariableOp":
            constant = node is not None and node.op == b"Const"
            raise _PathError("the path is a constant" if constant else "the path is no asset of the model")
        # tensorflow/python/saved_model/save.py, _process_asset: a variable to which the asset is assigned.
        for _, handle in self._trace(b"", self._input(node, 0)):
            self._require_asset_variable(handle)

    def _require_asset_variable(self, handle: bytes) -> None:
        graph = self.body(b"")
        node = graph.get(handle)
        if node is None or node.op != b"VarHandleOp" or self._shares_name(handle, node):
            raise _PathError("the path is no asset of the model")
        for user in graph.values():
            if handle not in map(node_name, user.inputs):
                continue
            if user.op == b"AssignVariableOp" and user.values[:1] == (handle,):
                for _, name in self._trace(b"", self._input(user, 1)):
                    if name not in self.assets:
                        raise _PathError("the path is a variable")
                    self._require_inside(self.assets[name])
            elif handle in user.values and user.op not in (b"ReadVariableOp", b"VarIsInitializedOp"):
                raise _PathError("the path is a variable")

    def _shares_name(self, handle: bytes, node: _Node) -> bool:
        """Return whether another handle of the graph is the same variable."""
        own = _shared_name(handle, node)
        others = (_parse_node(data) for function, data in self._audit.handles)
        return sum(_shared_name(name, other) == own for name, other in others) > 1

    def _require_inside(self, names: list[str]) -> None:
        folder = self._audit.folder
        if folder is None:
            raise _PathError("the path is a constant")
        for name in names:
            if not is_inside(name):
                raise _PathError("the asset is outside the model's folder")
            path = os.path.join(folder, "assets", name)
            try:
                File.beside(path, os.path.join(folder, "saved_model.pb"))
            except FileNotFoundError:
                continue
            except CkpttoolError as error:
                if error.kind != "not_found":
                    raise _PathError("the asset is outside the model's folder") from error

    # Steps backwards.

    def _input(self, node: _Node, at: int) -> bytes:
        values = node.values
        if at >= len(values):
            raise _PathError("the path is missing")
        return values[at]

    def _argument(self, end: _NodeLocation) -> int:
        arguments = self.arguments(end.function)
        if end.node not in arguments:
            raise _PathError("the path is a constant")
        return arguments.index(end.node)

    def _trace(self, function: bytes, tensor: bytes, *, joins: bool = False) -> list[_NodeLocation]:
        """Return the origins of a tensor: behind copies and, with `joins`, behind the saver's suffixes."""
        body, arguments = self.body(function), self.arguments(function)
        ends, waiting, visited = [], [tensor], set()
        while waiting:
            name = waiting.pop()
            if name in visited:
                continue
            visited.add(name)
            node = body.get(name)
            if node is None or name in arguments:
                ends.append(_NodeLocation(function, name))
            elif node.op == b"Identity":
                waiting.append(self._input(node, 0))
            elif joins and node.op == b"Pack":
                waiting += node.values
            elif joins and node.op in (b"ShardedFilename", b"ShardedFilespec", b"StringJoin"):
                waiting.append(self._input(node, 0))
                if node.op == b"StringJoin":
                    self._require_suffixes(function, node.values[1:])
            else:
                ends.append(_NodeLocation(function, name))
        return ends

    def _require_suffixes(self, function: bytes, names: Iterable[bytes]) -> None:
        waiting = list(names)
        while waiting:
            node = self.body(function).get(waiting.pop())
            if node is not None and node.op in (b"Select", b"SelectV2") and len(node.values) == 3:
                choices = [self.body(function).get(name) for name in node.values[1:]]
            else:
                choices = [node]
            for choice in choices:
                if not _SUFFIX.fullmatch(_only_string(choice) or b""):
                    raise _PathError("the path is computed")


def _tensor_names(info: memoryview) -> Iterator[bytes]:
    """Yield the names of the tensors of a TensorInfo: dense (1), sparse (4) and composite (5) ones."""
    for number, value in protobuf.parse_fields(info, dict.fromkeys((1, 4, 5), _MESSAGE)):
        content = protobuf.as_message(value)
        if number == 1:
            yield bytes(content)
        elif number == 4:
            for _, name in protobuf.parse_fields(content, dict.fromkeys((1, 2, 3), _MESSAGE)):
                yield bytes(protobuf.as_message(name))
        else:
            for component in _submessages(content, 2):
                yield from (bytes(name) for name in _submessages(component, 1))


def _shared_name(name: bytes, node: _Node) -> bytes:
    for attribute, values in _attributes(node.data):
        if attribute == b"shared_name":
            name = next((bytes(value) for number, value in values if number == _STRING and value), name)
    return name
