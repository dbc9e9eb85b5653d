#include "elementwise.inl"
