/*
 * exp, erfc and pow of a vector, lane by lane through libm: what the instruction sets use in a build without SLEEF.  Bits then
 * depend on the C library, but not on the instruction set.
 */
EKV_INLINE vf vf_exp(vf a) {
    float x[32];
    vf_store(x, a);
    for (int i = 0; i < 32; i++) x[i] = expf(x[i]);
    return vf_load(x);
}
EKV_INLINE vd vd_exp(vd a) {
    double x[8];
    memcpy(x, &a, sizeof x);
    for (int i = 0; i < 8; i++) x[i] = exp(x[i]);
    return vd_load(x);
}
EKV_INLINE vd vd_erfc(vd a) {
    double x[8];
    memcpy(x, &a, sizeof x);
    for (int i = 0; i < 8; i++) x[i] = erfc(x[i]);
    return vd_load(x);
}
EKV_INLINE vd vd_pow(vd a, vd b) {
    double x[8], y[8];
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 8; i++) x[i] = pow(x[i], y[i]);
    return vd_load(x);
}
