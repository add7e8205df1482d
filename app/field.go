package app

import (
	"strconv"
)

// field is one key of a map of the file. The fields are the schema: the reader, the hints and the test of the
// sample use them.
type field[T any] struct {
	key   string
	later bool // known, but not supported yet: a fault, never ignored silently
	read  func(c cursor, into *T)
}

// readFields reads the map at c into t. Keys that are not in fields are faults. An empty value counts as not
// written.
func readFields[T any](c cursor, t *T, fields []field[T]) {
	if !c.isMap() {
		return
	}
	for _, e := range c.n.entries {
		sub := c.key(e)
		f := find(fields, e.key)
		switch {
		case f == nil:
			c.d.fault(e.place, sub.path, Fault{Message: "unknown key " + strconv.Quote(e.key),
				Hint: keyHint(e.key, fields)})
		case f.later:
			c.d.fault(e.place, sub.path, notYet(strconv.Quote(e.key)))
		case e.value.shape != nullShape:
			sub.mark()
			f.read(sub, t)
		}
	}
}

func find[T any](fields []field[T], key string) *field[T] {
	for i := range fields {
		if fields[i].key == key {
			return &fields[i]
		}
	}
	return nil
}

func keyHint[T any](key string, fields []field[T]) string {
	var known []string
	list := ""
	for _, f := range fields {
		known = append(known, f.key)
		if !f.later {
			list += ", " + f.key
		}
	}
	if hint := didYouMean(key, known); hint != "" {
		return hint
	}
	return "the keys here are " + list[len(", "):]
}

// notYet is the fault of a key or a word that is not supported yet.
func notYet(what string) Fault {
	return Fault{Message: what + " is not supported in this version",
		Hint: "it comes with a later version; leave it out"}
}

// child makes a reader of a map inside T.
func child[T, S any](part func(*T) *S, fields func() []field[S]) func(cursor, *T) {
	return func(c cursor, t *T) { readFields(c, part(t), fields()) }
}

// text and the functions below it make readers of one value of T.
func text[T any](part func(*T) *string) func(cursor, *T) {
	return func(c cursor, t *T) { c.text(part(t)) }
}

func word[T any](part func(*T) *string, words ...string) func(cursor, *T) {
	return func(c cursor, t *T) { c.word(part(t), words...) }
}

func whole[T any](part func(*T) *int, low, high int64) func(cursor, *T) {
	return func(c cursor, t *T) { c.whole(part(t), low, high) }
}

func seconds[T any](part func(*T) *float64) func(cursor, *T) {
	return func(c cursor, t *T) { c.seconds(part(t)) }
}

func texts[T any](part func(*T) *[]string) func(cursor, *T) {
	return func(c cursor, t *T) { c.texts(part(t)) }
}
