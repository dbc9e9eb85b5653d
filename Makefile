PYTHON ?= python3
native:
	cmake -S . -B build/native -DCMAKE_BUILD_TYPE=Release -DPELTON_INPLACE=ON >/dev/null && cmake --build build/native -j2
.PHONY: native
