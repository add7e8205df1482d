package engineflags

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestFind(t *testing.T) {
	for _, c := range []struct {
		engine, name string
		want         Takes
	}{
		{VLLM, "enforce-eager", Switch},
		{VLLM, "no-enforce-eager", Switch},
		{VLLM, "max-num-seqs", One},
		{VLLM, "no-max-num-seqs", Unknown},
		{VLLM, "compilation-config.mode", One},
		{VLLM, "enforce-eager.x", Unknown},
		{VLLM, "served-model-name", Many},
		{VLLM, "mem-fraction-static", Unknown},
		{SGLang, "mem-fraction-static", One},
		{SGLang, "no-enable-metrics", Unknown}, // SGLang's switches have no opposite
		{SGLang, "served-model-name", One},
		{Sim, "mem-fraction-static", One},
		{Sim, "sim-speed", One},
		{Sim, "sim-kv-sliding-window", Switch},
		{"none", "max-num-seqs", Unknown},
	} {
		assert.Equal(t, c.want, Find(c.engine, c.name), "%s --%s", c.engine, c.name)
	}
	assert.Empty(t, Names("none"))
}

// The tables name every flag once, and the counterparts are flags.
func TestTables(t *testing.T) {
	for engine, lists := range map[string][]string{
		VLLM: {vllmSwitches, vllmOne, vllmMany}, SGLang: {sglangSwitches, sglangOne, sglangMany},
	} {
		names := strings.Fields(strings.Join(lists, " "))
		assert.Len(t, names, len(Names(engine)), "%s has a flag twice", engine)
		assert.Greater(t, len(names), 200)
		for _, name := range names {
			assert.Regexp(t, `^[a-z0-9]+(-[a-z0-9]+)*$`, name)
		}
	}
	for _, same := range sameFlags {
		assert.NotEqual(t, Unknown, Find(VLLM, same[0]), same[0])
		assert.NotEqual(t, Unknown, Find(SGLang, same[1]), same[1])
		assert.Equal(t, same[0], Counterpart(VLLM, same[1]))
		assert.Equal(t, same[1], Counterpart(SGLang, same[0]))
	}
	for short, long := range shortNames {
		assert.NotEqual(t, Unknown, Find(VLLM, long), short)
	}
	assert.Empty(t, Counterpart(VLLM, "no-such-flag"))
}

func TestNext(t *testing.T) {
	for _, c := range []struct {
		engine, words, name string
		values              []string
		rest                int
	}{
		{VLLM, "--max-num-seqs 8 x", "max-num-seqs", []string{"8"}, 1},
		{VLLM, "--max_num_seqs=8 x", "max-num-seqs", []string{"8"}, 1},
		{VLLM, "--enforce-eager x", "enforce-eager", nil, 1},
		{VLLM, "--served-model-name a b --x", "served-model-name", []string{"a", "b"}, 1},
		{VLLM, "--seed -1", "seed", []string{"-1"}, 0},
		{VLLM, "--seed --x", "seed", nil, 1},
		{VLLM, "--new x y", "new", []string{"x"}, 1},
		{VLLM, "-tp 4", "tensor-parallel-size", []string{"4"}, 0},
		{VLLM, "-tp=4", "tensor-parallel-size", []string{"4"}, 0},
		{VLLM, "--tp-size 4", "tensor-parallel-size", []string{"4"}, 0},
		{SGLang, "--tensor-parallel-size 4", "tp-size", []string{"4"}, 0},
		{SGLang, "--tp 4", "tp-size", []string{"4"}, 0},
		{VLLM, "-O3 x", "optimization-level", []string{"3"}, 1},
		{VLLM, "-O 3", "optimization-level", []string{"3"}, 0},
		{VLLM, "-cc.cudagraph_mode NONE", "compilation-config.cudagraph_mode", []string{"NONE"}, 0},
		{VLLM, "--hf-overrides.rope_scaling.factor=2", "hf-overrides.rope_scaling.factor", []string{"2"}, 0},
		{VLLM, "-ep x", "enable-expert-parallel", nil, 1},
	} {
		words := strings.Fields(c.words)
		f, rest := Next(c.engine, words)
		assert.Equal(t, Flag{c.name, f.Typed, c.values}, f, c.words)
		assert.Len(t, rest, c.rest, c.words)
		assert.True(t, strings.HasPrefix(words[0], f.Typed), c.words)
	}
}

// FuzzNext: every call takes the flag away, and nothing but the flag and words behind it.
func FuzzNext(f *testing.F) {
	f.Add(VLLM, "--a=b\x00c")
	f.Add(SGLang, "-\x00-x")
	f.Add(Sim, "-O\x00--\x00--sim-fail\x00hang")
	f.Fuzz(func(t *testing.T, engine, joined string) {
		words := strings.Split(joined, "\x00")
		for len(words) > 0 {
			if !IsFlag(words[0]) {
				words = words[1:]
				continue
			}
			flag, rest := Next(engine, words)
			require.Less(t, len(rest), len(words))
			require.LessOrEqual(t, len(flag.Values), len(words)-len(rest))
			words = rest
		}
	})
}

// An owned flag is one of an engine; a file and `dpserve serve` have one answer each.
func TestOwnedFlags(t *testing.T) {
	for name, owned := range ownedFlags {
		isKnown := Find(Sim, name) != Unknown || shortNames[name] != ""
		assert.True(t, isKnown, "no engine has --%s", name)
		assert.NotEmpty(t, owned.InFile, name)
		answers := 0
		for _, answer := range []string{owned.Flag, owned.LeftOut, owned.OnServe} {
			if answer != "" {
				answers++
			}
		}
		assert.Equal(t, 1, answers, "--%s on the command line of serve", name)
	}
	for name, want := range map[string]bool{
		"dpn": true, "kv-events-config.publisher": true, "data-parallel-of-a-later-version": true,
		"max-num-seqs": false, "tp": false, "q": false,
	} {
		_, is := FindOwned(name)
		assert.Equal(t, want, is, name)
	}
}
