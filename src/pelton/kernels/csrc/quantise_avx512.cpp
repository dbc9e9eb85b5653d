#include "quantise.inl"
