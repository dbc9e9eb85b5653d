#include "pointwise.inl"
