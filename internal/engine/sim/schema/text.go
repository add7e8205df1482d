package schema

import (
	"fmt"
	"math/rand/v2"
	"regexp/syntax"
	"strings"
	"unicode"
	"unicode/utf8"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// FromPattern writes a text that a regular expression matches as a whole: the same one for the same seed.
func FromPattern(pattern string, seed uint64) (string, error) {
	r := &run{checker: checker{steps: maxSteps}, bytes: maxTextBytes}
	r.rnd = rand.New(rand.NewPCG(seed, 0))
	return r.matching(`^(?:`+pattern+`)$`, 0, maxTextBytes)
}

// text writes words, or what a format or a pattern wants.
func (r *run) text(all []*object) (any, error) {
	least, most := size(all, "minLength", 0), size(all, "maxLength", maxTextBytes)
	pattern, form := "", ""
	for _, s := range all {
		if p, ok := s.values["pattern"].(string); ok && p != "" {
			pattern = p
		}
		if f, ok := s.values["format"].(string); ok {
			form = f
		}
	}
	var out string
	switch write := formats[form]; {
	case least > r.bytes:
		return nil, errLarge
	case most < least:
		return nil, errNoValue
	case pattern != "":
		var err error
		if out, err = r.matching(pattern, least, most); err != nil {
			return nil, err
		}
	case write != nil:
		out = write(r.rnd)
	default:
		out = r.words(least, most)
	}
	return out, r.spend(len(out))
}

// words writes one to three words, longer or shorter where the length has to be.
func (r *run) words(least, most int) string {
	fields := strings.Fields(string(em.NewGenerator(em.ProseAfter(r.rnd.Uint64(), nil, 0)).Bytes(16)))
	out := []rune(strings.Join(fields[:min(1+r.rnd.IntN(3), len(fields)-1)], " ")) // the last one may be cut
	for i := 0; len(out) < least; i++ {
		out = append(out, rune('a'+i%26))
	}
	return string(out[:min(len(out), most)])
}

// matching writes a text that a pattern matches, of a length between least and most characters.
func (r *run) matching(pattern string, least, most int) (string, error) {
	p, err := r.compile(pattern)
	if err != nil {
		return "", err
	}
	parsed, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return "", err // it cannot be: the pattern has been compiled
	}
	for _, more := range []int{1, 0, 2, 4, 8, 16, 32, 64, 128, 256} { // repetitions beyond what must be
		for range draws {
			var b strings.Builder
			if err := r.part(&b, parsed, more); err != nil {
				return "", err
			}
			out := b.String()
			if n := utf8.RuneCountInString(out); n >= least && n <= most && p.MatchString(out) {
				return out, nil
			}
		}
	}
	return "", faultf("no text was found that the pattern %.100q matches", pattern)
}

// part writes a text by the parts of a pattern; more is how often a part is repeated at most, beyond how
// often it must be. Anchors and word boundaries are not looked at.
func (r *run) part(b *strings.Builder, p *syntax.Regexp, more int) error {
	if b.Len() > r.bytes {
		return errLarge
	}
	if err := r.step(); err != nil {
		return err
	}
	least, most := 1, 1
	switch p.Op { // the others are places, which have no text
	case syntax.OpLiteral:
		b.WriteString(string(p.Rune))
		return nil
	case syntax.OpCharClass:
		if len(p.Rune) == 0 {
			return errNoValue
		}
		b.WriteRune(r.character(p.Rune))
		return nil
	case syntax.OpAnyChar, syntax.OpAnyCharNotNL:
		b.WriteRune('a' + r.rnd.Int32N(26))
		return nil
	case syntax.OpNoMatch:
		return errNoValue
	case syntax.OpAlternate:
		return r.part(b, p.Sub[r.rnd.IntN(len(p.Sub))], more)
	case syntax.OpStar:
		least, most = 0, more
	case syntax.OpPlus:
		most = 1 + more
	case syntax.OpQuest:
		least = 0
	case syntax.OpRepeat:
		least, most = p.Min, p.Min+more
		if p.Max >= 0 {
			most = min(most, p.Max)
		}
	case syntax.OpConcat, syntax.OpCapture:
	default:
		return nil
	}
	for range least + r.rnd.IntN(most-least+1) {
		for _, sub := range p.Sub {
			if err := r.part(b, sub, more); err != nil {
				return err
			}
		}
	}
	return nil
}

// character draws one of a class, which is a list of ranges: a printable one of ASCII where there is one.
func (r *run) character(ranges []rune) rune {
	var printable []rune
	for i := 0; i+1 < len(ranges); i += 2 {
		for c := max(ranges[i], ' '); c <= min(ranges[i+1], '~'); c++ {
			printable = append(printable, c)
		}
	}
	if len(printable) > 0 {
		plain := printable[:0:0]
		for _, c := range printable {
			if unicode.IsLetter(c) || unicode.IsDigit(c) {
				plain = append(plain, c)
			}
		}
		if len(plain) > 0 {
			printable = plain
		}
		return printable[r.rnd.IntN(len(printable))]
	}
	i := 2 * r.rnd.IntN(len(ranges)/2)
	span := min(ranges[i+1]-ranges[i], 1000)
	return ranges[i] + rune(r.rnd.IntN(int(span)+1))
}

// formats writes texts of the formats that JSON Schema names. Others say nothing about the text.
var formats = map[string]func(*rand.Rand) string{
	"date-time":    func(r *rand.Rand) string { return date(r) + "T" + clock(r) },
	"date":         date,
	"time":         clock,
	"duration":     func(r *rand.Rand) string { return fmt.Sprintf("PT%dM", 1+r.IntN(59)) },
	"email":        func(r *rand.Rand) string { return fmt.Sprintf("user%d@example.com", r.IntN(1000)) },
	"idn-email":    func(r *rand.Rand) string { return fmt.Sprintf("user%d@example.com", r.IntN(1000)) },
	"hostname":     func(r *rand.Rand) string { return fmt.Sprintf("host%d.example.com", r.IntN(1000)) },
	"idn-hostname": func(r *rand.Rand) string { return fmt.Sprintf("host%d.example.com", r.IntN(1000)) },
	"ipv4":         func(r *rand.Rand) string { return fmt.Sprintf("192.0.2.%d", r.IntN(256)) },
	"ipv6":         func(r *rand.Rand) string { return fmt.Sprintf("2001:db8::%x", 1+r.IntN(65535)) },
	"uri":          address, "uri-reference": address, "uri-template": address, "url": address,
	"iri": address, "iri-reference": address,
	"json-pointer":          func(r *rand.Rand) string { return fmt.Sprintf("/key%d", r.IntN(1000)) },
	"relative-json-pointer": func(r *rand.Rand) string { return fmt.Sprintf("%d/key", r.IntN(10)) },
	"regex":                 func(*rand.Rand) string { return "^a+$" },
	"uuid": func(r *rand.Rand) string {
		high, low := r.Uint64(), r.Uint64()
		return fmt.Sprintf("%08x-%04x-4%03x-a%03x-%012x", high>>32, high>>16&0xffff, high&0xfff,
			low>>48&0xfff, low&(1<<48-1))
	},
}

func date(r *rand.Rand) string {
	return fmt.Sprintf("20%02d-%02d-%02d", 20+r.IntN(10), 1+r.IntN(12), 1+r.IntN(28))
}

func clock(r *rand.Rand) string {
	return fmt.Sprintf("%02d:%02d:%02dZ", r.IntN(24), r.IntN(60), r.IntN(60))
}

func address(r *rand.Rand) string { return fmt.Sprintf("https://example.com/%d", r.IntN(1000)) }
