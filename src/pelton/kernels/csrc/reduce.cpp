#include "reduce.inl"
