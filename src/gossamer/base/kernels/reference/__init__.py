"""Reference kernels in plain torch: the truth that compiled loops equal bit for bit.

quantize, levels, onebit, ternary, twobit     codes of 8, a few, 1, less than 2, and 2 bits
float4, sign_magnitude                        a sign and a power of two; a sign and one of two magnitudes
half                                          16-bit numbers, summed in 32 bits
hadamard                                      a rotation made of sums and differences
select, index_coding                          which entries travel, and their places in few bits
bits, segments                                packing of small codes; blocks that respect tensors
counter_rng                                   random numbers by key and place
dct                                           cosines, by products of small matrices
low_rank, gram_schmidt                        matrices as two thin factors; orthonormal columns
residual, finite                              the part that was not sent; finiteness
"""
