#include "attention.inl"
