#include "norm.inl"
