// Package release has the tests of tools/release.
package release
