"""Set/Get of heterogeneous objects. In: named tensors, wherever they are. Out: the same, where they are needed."""
