"""Set/Get of heterogeneous objects. In: named tensors from wherever they are. Out: the same, where they are wanted."""
