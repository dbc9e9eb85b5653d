#include "rope_kv.inl"
