"""Look up the rows of a served model over gRPC, with NVIDIA's Triton client and no import of hotrow.

pip install 'tritonclient[grpc]'
hotrow serve repository/
python examples/embeddings_grpc.py 127.0.0.1:8001 ctr
"""

from __future__ import annotations

import sys

import numpy as np
import tritonclient.grpc as triton


def main(address: str, model: str) -> None:
    client = triton.InferenceServerClient(address)
    inputs = []
    for feature, keys in (("user", [7, 8]), ("item", [2, 3])):
        inputs.append(triton.InferInput(feature, [len(keys)], "INT64"))
        inputs[-1].set_data_from_numpy(np.array(keys))
    outputs = [triton.InferRequestedOutput("embeddings.user"), triton.InferRequestedOutput("embeddings.item")]
    answer = client.infer(model, inputs, outputs=outputs, parameters={"embeddings_datatype": "FP16"})
    for output in outputs:
        vectors = answer.as_numpy(output.name())
        print(output.name(), vectors.shape, vectors.dtype, vectors[0, :3])
    print("publication", answer.get_response().parameters["publication"].int64_param)


if __name__ == "__main__":
    main(*sys.argv[1:])
