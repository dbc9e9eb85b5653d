// Asynchronous products whose left operand is in registers: part of hopper_wide.cu.
#pragma once

// d (64 x n) = a (64 x 16, registers) @ b (n x 16) transposed, plus d where ADD; `b`: the low half of its description (`matrix` in
// hopper.cuh), as the high one is the same everywhere: 1024 bytes from eight rows to the next, swizzled.
#define DESCRIBED(low, add) "{\n.reg .b64 b;\n.reg .pred p;\nmov.b64 b, {" low ", 0x40000040};\nsetp.ne.u32 p, " add ", 0;\n"
#define NAMES128                                                                                             \
    NAMES64                                                                                                  \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89," \
    "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
    "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define NAMES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
template <int ADD>
DEVICE void product(float (&d)[16], const u32 (&a)[4], u32 b) {
    asm volatile(DESCRIBED("%20", "%21")
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" NAMES16 "}, {%16,%17,%18,%19}, b, p, 1, 1, 0;\n}"
                 : OUT8(d, 0), OUT8(d, 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}
template <int ADD>
DEVICE void product(float (&d)[32], const u32 (&a)[4], u32 b) {
    asm volatile(DESCRIBED("%36", "%37")
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES32 "}, {%32,%33,%34,%35}, b, p, 1, 1, 0;\n}"
                 : OUT32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}
template <int ADD>
DEVICE void product(float (&d)[64], const u32 (&a)[4], u32 b) {
    asm volatile(DESCRIBED("%68", "%69")
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES64 "}, {%64,%65,%66,%67}, b, p, 1, 1, 0;\n}"
                 : OUT32(d, 0), OUT32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}
template <int ADD>
DEVICE void product(float (&d)[128], const u32 (&a)[4], u32 b) {
    asm volatile(DESCRIBED("%132", "%133")
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" NAMES128 "}, {%128,%129,%130,%131}, b, p, 1, 1, 0;\n}"
                 : OUT32(d, 0), OUT32(d, 32), OUT32(d, 64), OUT32(d, 96)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(ADD));
}
