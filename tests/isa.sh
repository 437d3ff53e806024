#!/bin/sh
# Test isa-disassembly: the proof that code for one instruction set cannot run on a processor without it.
# SPDX-License-Identifier: Apache-2.0
#
#   tests/isa.sh OBJDUMP NM baseline OBJECT... [ISA OBJECT...]...        ISA: scalar avx2 avx512
#
# - Objects of the baseline and of scalar hold no instruction in VEX or EVEX encoding (AVX, AVX2, AVX-512, FMA, F16C, BMI).
# - Objects of avx2 hold VEX instructions, but none that needs AVX-512 (zmm, mask or upper registers).
# - Objects of avx512 hold instructions on zmm registers (else the check itself would be blind).
# - The object of an instruction set defines one symbol, its table: nothing of it can be linked in the place of a function of another.
set -eu

objdump=$1
nm=$2
shift 2

# Mnemonic and operands of every instruction, one a line.
disassemble() {
    "$objdump" -d --no-show-raw-insn "$1" | sed -n 's/^ *[0-9a-f]*:[[:space:]]*//p'
}

vex='^(\{[a-z0-9]*\} *)?(v[a-z0-9_]+|andn|bextr|blsi|blsr|blsmsk|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|k(mov|and|andn|or|ortest|xor|xnor|not|test|unpck|shift|add)[a-z]*)( |$)'
not_vex='^(verr|verw|vm(m?call|launch|resume|xoff|xon|clear|ptrld|ptrst|read|write|func|run|load|save))( |$)' # not on vectors
evex='%zmm|%[xy]mm(1[6-9]|2[0-9]|3[01])|%k[0-7]|\{z\}'

count_vex() { disassemble "$1" | grep -Ev "$not_vex" | grep -Ec "$vex" || true; }
count_evex() { disassemble "$1" | grep -Ec "$evex" || true; }

failed=0
fail() {
    echo "isa.sh: $1" >&2
    failed=1
}

set_of='' objects=0
for argument in "$@"; do
    case $argument in
        baseline | scalar | avx2 | avx512)
            set_of=$argument
            continue
            ;;
    esac
    objects=$((objects + 1))
    instructions=$(disassemble "$argument" | wc -l)
    vex_count=$(count_vex "$argument")
    evex_count=$(count_evex "$argument")
    echo "$set_of $(basename "$argument"): $instructions instructions, $vex_count VEX or EVEX, $evex_count AVX-512"
    [ "$instructions" -gt 0 ] || fail "$argument: the disassembler shows no instructions"
    case $set_of in
        baseline | scalar)
            if [ "$vex_count" -ne 0 ]; then
                fail "$argument: vector instructions above the baseline:"
                disassemble "$argument" | grep -Ev "$not_vex" | grep -E "$vex" | head -n 5 >&2
            fi
            ;;
        avx2)
            [ "$vex_count" -gt 0 ] || fail "$argument: no VEX instruction was found: the check is blind"
            [ "$evex_count" -eq 0 ] || fail "$argument: AVX-512 instructions in the object of avx2"
            ;;
        avx512) [ "$evex_count" -gt 0 ] || fail "$argument: no AVX-512 instruction was found: the check is blind" ;;
    esac
    if [ "$set_of" != baseline ]; then
        symbols=$("$nm" -g --defined-only "$argument" | awk 'NF == 3 { print $3 }' | tr '\n' ' ')
        [ "$symbols" = "ekv_kernels_$set_of " ] || fail "$argument: defines $symbols, expected ekv_kernels_$set_of alone"
    fi
done
[ "$objects" -gt 0 ] || fail "no objects were given"
exit "$failed"
