// Operands of asynchronous products (wgmma) whose sums are N / 2 registers, for N = 16 to 256 in sixteens. Three
// operands stand before them: `SUM_NAMES_g` names 8 g registers from %3 on, `SUM_VALUES_g` binds them.
#pragma once

#define SUM_8(d, i) SUM(d[i]), SUM(d[i + 1]), SUM(d[i + 2]), SUM(d[i + 3]), SUM(d[i + 4]), SUM(d[i + 5]), SUM(d[i + 6]), SUM(d[i + 7])
#define SUM_NAMES_1 "%3,%4,%5,%6,%7,%8,%9,%10"
#define SUM_NAMES_2 SUM_NAMES_1 ",%11,%12,%13,%14,%15,%16,%17,%18"
#define SUM_NAMES_3 SUM_NAMES_2 ",%19,%20,%21,%22,%23,%24,%25,%26"
#define SUM_NAMES_4 SUM_NAMES_3 ",%27,%28,%29,%30,%31,%32,%33,%34"
#define SUM_NAMES_5 SUM_NAMES_4 ",%35,%36,%37,%38,%39,%40,%41,%42"
#define SUM_NAMES_6 SUM_NAMES_5 ",%43,%44,%45,%46,%47,%48,%49,%50"
#define SUM_NAMES_7 SUM_NAMES_6 ",%51,%52,%53,%54,%55,%56,%57,%58"
#define SUM_NAMES_8 SUM_NAMES_7 ",%59,%60,%61,%62,%63,%64,%65,%66"
#define SUM_NAMES_9 SUM_NAMES_8 ",%67,%68,%69,%70,%71,%72,%73,%74"
#define SUM_NAMES_10 SUM_NAMES_9 ",%75,%76,%77,%78,%79,%80,%81,%82"
#define SUM_NAMES_11 SUM_NAMES_10 ",%83,%84,%85,%86,%87,%88,%89,%90"
#define SUM_NAMES_12 SUM_NAMES_11 ",%91,%92,%93,%94,%95,%96,%97,%98"
#define SUM_NAMES_13 SUM_NAMES_12 ",%99,%100,%101,%102,%103,%104,%105,%106"
#define SUM_NAMES_14 SUM_NAMES_13 ",%107,%108,%109,%110,%111,%112,%113,%114"
#define SUM_NAMES_15 SUM_NAMES_14 ",%115,%116,%117,%118,%119,%120,%121,%122"
#define SUM_NAMES_16 SUM_NAMES_15 ",%123,%124,%125,%126,%127,%128,%129,%130"
#define SUM_VALUES_1(d) SUM_8(d, 0)
#define SUM_VALUES_2(d) SUM_VALUES_1(d), SUM_8(d, 8)
#define SUM_VALUES_3(d) SUM_VALUES_2(d), SUM_8(d, 16)
#define SUM_VALUES_4(d) SUM_VALUES_3(d), SUM_8(d, 24)
#define SUM_VALUES_5(d) SUM_VALUES_4(d), SUM_8(d, 32)
#define SUM_VALUES_6(d) SUM_VALUES_5(d), SUM_8(d, 40)
#define SUM_VALUES_7(d) SUM_VALUES_6(d), SUM_8(d, 48)
#define SUM_VALUES_8(d) SUM_VALUES_7(d), SUM_8(d, 56)
#define SUM_VALUES_9(d) SUM_VALUES_8(d), SUM_8(d, 64)
#define SUM_VALUES_10(d) SUM_VALUES_9(d), SUM_8(d, 72)
#define SUM_VALUES_11(d) SUM_VALUES_10(d), SUM_8(d, 80)
#define SUM_VALUES_12(d) SUM_VALUES_11(d), SUM_8(d, 88)
#define SUM_VALUES_13(d) SUM_VALUES_12(d), SUM_8(d, 96)
#define SUM_VALUES_14(d) SUM_VALUES_13(d), SUM_8(d, 104)
#define SUM_VALUES_15(d) SUM_VALUES_14(d), SUM_8(d, 112)
#define SUM_VALUES_16(d) SUM_VALUES_15(d), SUM_8(d, 120)
