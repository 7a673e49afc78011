// Package maintenance has the maintenance file: when nodes may be disturbed, and how many of a pool at once.
package maintenance
