"""The stages of the chunk form as Triton kernels; each stands once and serves every op."""
